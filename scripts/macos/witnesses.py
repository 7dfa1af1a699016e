"""Which symbols Apple's libraries have, told without Apple's SDK: by programs that need them.

Whatever a binary built by Apple's linker for macOS 14 or older imports from libc++, libobjc or
libSystem, those libraries export on every macOS since. Binaries in public wheels are the witnesses.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from scripts.macos.macho import LIBCXX, LIBOBJC, LIBSYSTEM, MachO

STUBS = {"libc++": LIBCXX, "libobjc": LIBOBJC, "libSystem": LIBSYSTEM}
"""What the linker's -l option calls them, and their install names."""


def witnessed_symbols(
    images: Iterable[MachO], min_macos: tuple[int, ...]
) -> dict[str, frozenset[str]]:
    """What `images` that run on `min_macos` must find, by install name of the library."""
    symbols: dict[str, set[str]] = {}
    for image in images:
        if image.platform == "MACOS" and image.min_macos <= min_macos:
            for needed in image.imports:
                if not needed.may_be_absent:
                    symbols.setdefault(needed.library, set()).add(needed.symbol)
    return {library: frozenset(names) for library, names in symbols.items()}


def text_stub(install_name: str, symbols: Iterable[str]) -> str:
    """A library in the linker's TAPI format, version 4."""
    names = ", ".join(f"'{symbol}'" for symbol in sorted(symbols))
    return (
        "--- !tapi-tbd\n"
        "tbd-version: 4\n"
        "targets: [ arm64-macos ]\n"
        f"install-name: '{install_name}'\n"
        "exports:\n"
        "  - targets: [ arm64-macos ]\n"
        f"    symbols: [ {names} ]\n"
        "...\n"
    )


def save(directory: Path, symbols: Mapping[str, frozenset[str]]) -> None:
    """Writes a text stub of each library in STUBS, and for `load` what the stubs list."""
    directory.mkdir(parents=True, exist_ok=True)
    for stub, install_name in STUBS.items():
        (directory / f"{stub}.tbd").write_text(text_stub(install_name, symbols[install_name]))
    listed = {install_name: sorted(symbols[install_name]) for install_name in STUBS.values()}
    (directory / "witnessed.json").write_text(json.dumps(listed, indent=0))


def load(directory: Path) -> dict[str, frozenset[str]]:
    """What `save` wrote: known symbols by install name."""
    listed = json.loads((directory / "witnessed.json").read_text())
    return {install_name: frozenset(symbols) for install_name, symbols in listed.items()}
