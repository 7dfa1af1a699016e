"""Runs the tests of keys with every pair of the lowest and the newest starlette and uvicorn that
pyproject.toml allows.

    python -m scripts.server_versions [--starlette 1.0.0]

It installs these versions from PyPI into temporary folders, which come before this environment's
own packages. The exit status is 1 if a test fails.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import distributions
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ("tests/server/test_keys.py", "tests/server/test_connections.py")
PACKAGES = ("starlette", "uvicorn")


def main() -> None:
    parser = argparse.ArgumentParser("server_versions", description=__doc__.partition("\n")[0])
    for name in PACKAGES:
        parser.add_argument(f"--{name}", metavar="VERSION", help="this version only")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for name in PACKAGES:
            only = getattr(args, name)
            wanted = [f"=={only}"] if only else ends(allowed(name))
            folders = [installed(Path(folder), name + which) for which in wanted]
            found.append({version_in(each, name): each for each in folders})
        for pair in product(*found):
            named = ", ".join(map(" ".join, zip(PACKAGES, pair, strict=True)))
            folders = [versions[version] for versions, version in zip(found, pair, strict=True)]
            print(f"{named}:", flush=True)
            paths = os.pathsep.join(map(str, [*folders, ROOT]))
            command = [sys.executable, "-m", "pytest", "-q", "--cases", "all", *TESTS]
            code = subprocess.call(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths})
            failed = failed or code != 0
    sys.exit(failed)


def allowed(name: str) -> str:
    """The versions of a package that pyproject.toml allows, for example ``>=1,<2``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    given = project["optional-dependencies"]["server"]
    (found,) = [each.removeprefix(name) for each in given if each.startswith(name)]
    return str(found)


def ends(versions: str) -> list[str]:
    """The lowest of these versions, and all, of which pip takes the newest."""
    (lowest,) = [part for part in versions.split(",") if part.startswith(">=")]
    return [lowest.replace(">=", "=="), versions]


def installed(folder: Path, requirement: str) -> Path:
    """A folder with a package alone."""
    target = Path(tempfile.mkdtemp(dir=folder))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, requirement], check=True)
    return target


def version_in(folder: Path, name: str) -> str:
    (found,) = [each.version for each in distributions(path=[str(folder)]) if each.name == name]
    return str(found)


if __name__ == "__main__":
    main()
