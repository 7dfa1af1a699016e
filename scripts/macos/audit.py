"""Would macOS load the extension, and would it share arrays with MLX's own module?

Everything is told from the files' contents; nothing here reads a file or knows the toolchain.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from scripts.macos.check import Check
from scripts.macos.code_signature import CodeSignature
from scripts.macos.macho import LIBCXX, LIBMLX, LIBOBJC, LIBSYSTEM, MachO

REQUIRED = {LIBMLX, LIBCXX, LIBSYSTEM}
ALLOWED = REQUIRED | {LIBOBJC}
RPATH = "@loader_path/../mlx/lib"
NANOBIND_DOMAIN = "mlx"
"""Extension modules exchange types within a domain; this is that of MLX's Python module."""

EXCEPTION_SYMBOLS = {"___cxa_throw", "___gxx_personality_v0"}
MISSING_SHOWN = 4


@dataclass(frozen=True)
class Surroundings:
    """What the extension meets in the process that imports it."""

    libmlx: MachO
    core: MachO
    """MLX's Python module, for the same version of Python."""
    symbols: Mapping[str, frozenset[str]]
    """All that are known to exist, by install name of the library, or INTERPRETER."""


def check_extension(
    ext: MachO, signature: CodeSignature | None, around: Surroundings
) -> list[Check]:
    return [
        _format(ext),
        _deployment_target(ext, around.libmlx),
        _dependencies(ext, around.libmlx),
        Check("rpath", ext.rpaths == (RPATH,), " ".join(ext.rpaths) or "none"),
        *_symbols(ext, around.symbols),
        _exception_runtime(ext),
        _unwind_tables(ext),
        Check("exports", ext.exports == {"_PyInit__ext"}, " ".join(sorted(ext.exports)) or "none"),
        _fixups(ext, around.core),
        _code_signature(signature),
        _nanobind_key(ext, around.core),
        _nanobind_domain(ext),
    ]


def _format(ext: MachO) -> Check:
    passed = (ext.cpu, ext.kind) == ("ARM64", "BUNDLE")
    return Check("format", passed, f"{ext.kind} for {ext.cpu}")


def _deployment_target(ext: MachO, libmlx: MachO) -> Check:
    passed = ext.platform == "MACOS" and ext.min_macos == libmlx.min_macos
    found = f"{ext.platform} {_dotted(ext.min_macos)}, libmlx {_dotted(libmlx.min_macos)}"
    return Check("deployment target", passed, found)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _dependencies(ext: MachO, libmlx: MachO) -> Check:
    names = set(ext.dependencies)
    passed = REQUIRED <= names <= ALLOWED and libmlx.install_name == LIBMLX
    return Check("dependencies", passed, " ".join(ext.dependencies))


def _symbols(ext: MachO, known: Mapping[str, frozenset[str]]) -> list[Check]:
    needed: dict[str, set[str]] = {}
    for entry in ext.imports:
        needed.setdefault(entry.library, set()).add(entry.symbol)
    return [
        _symbols_of(library, names, known.get(library, frozenset()))
        for library, names in sorted(needed.items())
    ]


def _symbols_of(library: str, needed: set[str], known: frozenset[str]) -> Check:
    missing = sorted(needed - known)
    found = f"{len(needed)} needed, {len(missing)} not known to exist"
    if missing:
        found += f" ({', '.join(missing[:MISSING_SHOWN])})"
    return Check(f"symbols of {library}", not missing, found)


def _exception_runtime(ext: MachO) -> Check:
    """A copy of libc++ within would throw what libmlx and nanobind could not catch."""
    shared = {entry.symbol for entry in ext.imports if entry.library == LIBCXX}
    own = sorted(EXCEPTION_SYMBOLS - shared)
    return Check("C++ runtime", not own, f"own copy of {', '.join(own)}" if own else "shared")


def _unwind_tables(ext: MachO) -> Check:
    sizes = {name: ext.sections.get(name, 0) for name in ("__gcc_except_tab", "__unwind_info")}
    found = ", ".join(f"{name} {size} bytes" for name, size in sizes.items())
    return Check("unwind tables", all(sizes.values()), found)


def _fixups(ext: MachO, core: MachO) -> Check:
    return Check("fixups", ext.fixups == core.fixups, f"{ext.fixups}, mlx.core {core.fixups}")


def _code_signature(signature: CodeSignature | None) -> Check:
    if signature is None:
        return Check("code signature", False, "none")
    found = "ad hoc" if signature.is_adhoc else "not ad hoc"
    found += f", {signature.valid_pages} of {signature.pages} page hashes right"
    if not signature.covers_code:
        found += ", not all of the code covered"
    return Check("code signature", signature.is_adhoc and signature.is_valid, found)


def _nanobind_key(ext: MachO, core: MachO) -> Check:
    own, mlx = nanobind_key(ext), nanobind_key(core)
    return Check("nanobind key", own is not None and own == mlx, f"{own}, mlx.core {mlx}")


def nanobind_key(image: MachO) -> str | None:
    """What nanobind calls the ABI that modules must have in common to exchange types."""
    keys = [s for s in image.strings if re.fullmatch(r"(nanobind|v\d+)_system_\w+", s)]
    return keys[0] if len(keys) == 1 else None


def _nanobind_domain(ext: MachO) -> Check:
    passed = NANOBIND_DOMAIN in ext.strings
    return Check("nanobind domain", passed, NANOBIND_DOMAIN if passed else f"not {NANOBIND_DOMAIN}")
