"""Writes text stubs of Apple's libraries to link against, and the list of their known symbols.

    python -m scripts.macos.write_stubs PACKAGES OUT

PACKAGES holds unpacked macOS wheels, mlx among them; all their binaries are witnesses.
"""

import sys
from pathlib import Path

from scripts.macos.macho_reader import parse_macho
from scripts.macos.witnesses import STUBS, save, witnessed_symbols


def main(packages: Path, out: Path) -> None:
    binaries = [*packages.rglob("*.dylib"), *packages.rglob("*.so")]
    images = [parse_macho(binary.read_bytes()) for binary in binaries]
    libmlx = parse_macho((packages / "mlx/lib/libmlx.dylib").read_bytes())
    symbols = witnessed_symbols(images, libmlx.min_macos)
    save(out, symbols)
    counts = ", ".join(f"{len(symbols[name])} of {stub}" for stub, name in STUBS.items())
    print(f"{len(images)} binaries witness {counts}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
