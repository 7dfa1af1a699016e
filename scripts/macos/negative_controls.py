"""Spoils the wheel in each way that the audit is there to notice, and demands that it does.

    python -m scripts.macos.negative_controls WHEEL --packages PACKAGES --stubs STUBS --build BUILD

BUILD is where setuptools built the wheel. Exit status 1 if anything went unnoticed.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.macos.audit_wheel import audit, expectations, parse_args, surroundings
from scripts.macos.macho import INTERPRETER, LIBCXX, LIBMLX
from scripts.macos.relink import Relinker, UndefinedSymbolError
from scripts.macos.spoiler import Spoiler
from scripts.macos.wheel import Expected, Wheel

COPY_GPU = "__ZN3mlx4core8copy_gpuERKNS0_5arrayERS1_NS0_8CopyTypeE"
"""Of libmlx, which does not export it."""
HASH_MEMORY = "__ZNSt3__113__hash_memoryEPKvm"
"""Of a libc++ newer than macOS 14's."""


@dataclass(frozen=True)
class Control:
    what: str
    noticed_by: str
    """The check that must fail, or "link" if the linker must refuse already."""
    spoil: Callable[[Spoiler], Wheel]


CONTROLS = [
    Control("a helper that libmlx does not export", "link", lambda it: it.calling(COPY_GPU)),
    Control(
        "the same behind a stub that claims it",
        f"symbols of {LIBMLX}",
        lambda it: it.calling_behind_stub(LIBMLX, COPY_GPU),
    ),
    Control("a symbol newer than macOS 14", "link", lambda it: it.calling(HASH_MEMORY)),
    Control(
        "the same behind a stub that claims it",
        f"symbols of {LIBCXX}",
        lambda it: it.calling_behind_stub(LIBCXX, HASH_MEMORY),
    ),
    Control(
        "a name that CPython does not have",
        f"symbols of {INTERPRETER}",
        lambda it: it.calling("_PyArray_New", "-U,_PyArray_New"),
    ),
    Control("static libc++, linked by zig", "C++ runtime", Spoiler.with_static_libcxx),
    Control("libmlx left to flat lookup", "dependencies", Spoiler.without_libmlx),
    Control("another library linked", "dependencies", Spoiler.with_another_library),
    Control("a second search path", "rpath", lambda it: it.relinked("-rpath,/opt/mlx/lib")),
    Control("made for macOS 15", "deployment target", lambda it: it.relinked(min_macos="15.0")),
    Control("a second export", "exports", lambda it: it.relinked("-alias,_PyInit__ext,_other")),
    Control("fixups as opcodes", "fixups", lambda it: it.relinked("-no_fixup_chains")),
    Control("not signed", "code signature", lambda it: it.relinked("-no_adhoc_codesign")),
    Control("a byte flipped after signing", "code signature", Spoiler.with_flipped_byte),
    Control("no exception tables", "unwind tables", Spoiler.without_exception_tables),
    Control("the previous nanobind ABI", "nanobind key", Spoiler.with_previous_nanobind),
    Control("another nanobind domain", "nanobind domain", Spoiler.with_other_domain),
    Control("a Linux module", "format", Spoiler.with_linux_module),
    Control("the module named for Linux", "wheel contents", Spoiler.with_linux_name),
    Control("a Python file missing", "wheel contents", Spoiler.without_engine),
    Control("a file changed after packing", "wheel record", Spoiler.with_stale_record),
    Control("a tag for macOS 11", "wheel tags", Spoiler.with_older_tag),
    Control("another mlx demanded", "mlx requirement", Spoiler.with_other_mlx),
]


def failed_checks(control: Control, spoiler: Spoiler, expected: Expected) -> list[str]:
    try:
        checks = audit(control.spoil(spoiler), expected, spoiler.around)
    except UndefinedSymbolError:
        return ["link"]
    return [check.name for check in checks if not check.passed]


def main() -> int:
    args = parse_args(with_build=True)
    around = surroundings(args.packages, args.stubs)
    expected = expectations(args.packages, around.libmlx)
    missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        libmlx = args.packages / "mlx/lib/libmlx.dylib"
        min_macos = "{}.{}".format(*around.libmlx.min_macos)
        relinker = Relinker(args.build, libmlx, args.stubs, Path(scratch), min_macos)
        spoiler = Spoiler(Wheel.read(args.wheel), relinker, around)
        for control in CONTROLS:
            failed = failed_checks(control, spoiler, expected)
            missed += control.noticed_by not in failed
            verdict = "noticed" if control.noticed_by in failed else "MISSED "
            print(f"{verdict}  {control.what:38}  {', '.join(failed) or 'nothing failed'}")
    print(f"CONTROLS {'FAIL' if missed else 'PASS'}: {len(CONTROLS)} defects, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
