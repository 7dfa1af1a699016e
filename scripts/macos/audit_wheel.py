"""Audits the macOS wheel: one line a check, RESULT PASS or FAIL, and the exit status to match.

    python -m scripts.macos.audit_wheel WHEEL --packages PACKAGES --stubs STUBS

PACKAGES holds the unpacked macOS wheels of mlx, STUBS what scripts.macos.write_stubs wrote. Run by
the version of Python that the wheel is for.
"""

import argparse
import ctypes
import sys
from pathlib import Path

import nanobind

from scripts.macos import witnesses
from scripts.macos.audit import Surroundings, check_extension
from scripts.macos.check import Check
from scripts.macos.code_signature import read_signature
from scripts.macos.macho import INTERPRETER, LIBMLX, MachO
from scripts.macos.macho_reader import parse_macho
from scripts.macos.wheel import PACKAGE, Expected, Wheel, check_wheel, package_files

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "cpython-{}{}".format(*sys.version_info)
EXTENSION = f"{PACKAGE}/_ext.{PYTHON}-darwin.so"


def audit(wheel: Wheel, expected: Expected, around: Surroundings) -> list[Check]:
    checks = check_wheel(wheel, expected)
    file = wheel.files.get(EXTENSION, b"")
    try:
        ext = parse_macho(file)
    except ValueError as error:
        return [*checks, Check("format", False, str(error))]
    return checks + check_extension(ext, read_signature(file), around)


def surroundings(packages: Path, stubs: Path) -> Surroundings:
    libmlx = parse_macho((packages / "mlx/lib/libmlx.dylib").read_bytes())
    core = parse_macho((packages / f"mlx/core.{PYTHON}-darwin.so").read_bytes())
    symbols = witnesses.load(stubs)
    symbols[LIBMLX] = libmlx.exports
    symbols[INTERPRETER] = interpreter_symbols(core)
    return Surroundings(libmlx, core, symbols)


def interpreter_symbols(core: MachO) -> frozenset[str]:
    """What MLX's own module imports from CPython, and what nanobind may and CPython has here."""
    imported = {entry.symbol for entry in core.imports if entry.library == INTERPRETER}
    options = Path(nanobind.cmake_dir(), "darwin-ld-cpython.sym").read_text().split()
    listed = {option for option in options if option.startswith("_")}
    # Darwin puts an underscore before every C name.
    present = {name for name in listed if hasattr(ctypes.pythonapi, name.removeprefix("_"))}
    return frozenset(imported | present)


def expectations(packages: Path, libmlx: MachO) -> Expected:
    python = "cp{}{}".format(*sys.version_info)
    macos = "_".join(map(str, libmlx.min_macos[:2]))
    (mlx,) = packages.glob("mlx-*.dist-info")
    return Expected(
        tag=f"{python}-{python}-macosx_{macos}_arm64",
        extension=EXTENSION,
        package_files=package_files(ROOT),
        mlx_version=mlx.name.removeprefix("mlx-").removesuffix(".dist-info"),
    )


def parse_args(with_build: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    for option in ("--packages", "--stubs", *(["--build"] if with_build else [])):
        parser.add_argument(option, type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    around = surroundings(args.packages, args.stubs)
    expected = expectations(args.packages, around.libmlx)
    checks = audit(Wheel.read(args.wheel), expected, around)
    print(args.wheel.name)
    print(*checks, sep="\n")
    passed = all(check.passed for check in checks)
    print("RESULT", "PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
