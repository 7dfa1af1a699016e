"""What the audit reads from a Mach-O file: how it is loaded, what it needs and what it offers."""

from dataclasses import dataclass

LIBMLX = "@rpath/libmlx.dylib"
LIBCXX = "/usr/lib/libc++.1.dylib"
LIBOBJC = "/usr/lib/libobjc.A.dylib"
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
INTERPRETER = "the interpreter"
"""In place of an install name: looked up in all loaded images, which is how an extension module
finds CPython."""


@dataclass(frozen=True)
class Import:
    """One symbol that the dynamic linker must find."""

    symbol: str
    library: str
    """Install name of the providing library, or INTERPRETER."""
    may_be_absent: bool = False
    """A weak reference: null where the library has no such symbol."""


@dataclass(frozen=True)
class MachO:
    """One image for one processor."""

    cpu: str
    kind: str
    """BUNDLE or DYLIB."""
    platform: str
    min_macos: tuple[int, ...]
    install_name: str | None
    dependencies: tuple[str, ...]
    """Install names, in load order."""
    rpaths: tuple[str, ...]
    imports: frozenset[Import]
    exports: frozenset[str]
    fixups: str
    """How addresses are bound at load time: chained or opcodes."""
    sections: dict[str, int]
    """Sizes in bytes."""
    strings: frozenset[str]
    """C string literals."""
