"""Prints the build requirements of pyproject.toml that a cross build needs, versions included.

    python -m scripts.macos.pins tools|mlx

"tools" run on this machine; "mlx" is linked against. This machine's own MLX is not needed.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def main(what: str) -> None:
    requires = tomllib.loads(PYPROJECT.read_text())["build-system"]["requires"]
    if what == "mlx":
        print(next(r.partition(";")[0] for r in requires if r.startswith("mlx==")))
    else:
        print(*(r for r in requires if not r.startswith("mlx")), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
