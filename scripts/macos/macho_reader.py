"""Reads Mach-O files with lief."""

import lief

from scripts.macos.macho import INTERPRETER, Import, MachO

_EXTERNAL = 0x01  # N_EXT
_TYPE = 0x0E  # N_TYPE; 0 is N_UNDF
_WEAK_REFERENCE = 0x40  # N_WEAK_REF
_WEAK_LOOKUP = -3  # BIND_SPECIAL_DYLIB_WEAK_LOOKUP
_FLAT_LOOKUP = (-2, 0xFE)  # in bindings, in the symbol table


def parse_macho(file: bytes) -> MachO:
    """The contents of a Mach-O file. Raises ValueError if that is not what `file` is."""
    lief.logging.disable()
    images = lief.MachO.parse(file)
    if images is None or images.at(0).build_version is None:
        raise ValueError("not a Mach-O file, or for no known platform")
    image = images.at(0)
    own_name = lief.MachO.LoadCommand.TYPE.ID_DYLIB
    return MachO(
        cpu=image.header.cpu_type.name,
        kind=image.header.file_type.name,
        platform=image.build_version.platform.name,
        min_macos=tuple(image.build_version.minos),
        install_name=next((x.name for x in image.libraries if x.command == own_name), None),
        dependencies=_dependencies(image),
        rpaths=tuple(rpath.path for rpath in image.rpaths),
        imports=_imports(image),
        exports=frozenset(str(x.name) for x in image.symbols if x.has_export_info),
        fixups="chained" if image.has_dyld_chained_fixups else "opcodes",
        sections={section.name: section.size for section in image.sections},
        strings=_strings(image),
    )


def _dependencies(image: lief.MachO.Binary) -> tuple[str, ...]:
    own_name = lief.MachO.LoadCommand.TYPE.ID_DYLIB
    return tuple(str(x.name) for x in image.libraries if x.command != own_name)


def _imports(image: lief.MachO.Binary) -> frozenset[Import]:
    """The symbol table's, and those of the bindings, which alone the dynamic linker goes by."""
    dependencies = _dependencies(image)

    def library(ordinal: int) -> str:
        if ordinal in _FLAT_LOOKUP:
            return INTERPRETER
        if 1 <= ordinal <= len(dependencies):
            return dependencies[ordinal - 1]
        return f"library ordinal {ordinal}"

    found = set()
    for symbol in image.symbols:
        if symbol.raw_type & (_TYPE | _EXTERNAL) == _EXTERNAL:
            found.add(_import(symbol, library(symbol.library_ordinal)))
    for binding in image.bindings:
        # For a weak lookup only the symbol table says where the static linker saw a definition.
        if binding.has_symbol and binding.library_ordinal != _WEAK_LOOKUP:
            found.add(_import(binding.symbol, library(binding.library_ordinal)))
    return frozenset(found)


def _import(symbol: lief.MachO.Symbol, library: str) -> Import:
    return Import(str(symbol.name), library, bool(symbol.description & _WEAK_REFERENCE))


def _strings(image: lief.MachO.Binary) -> frozenset[str]:
    section = image.get_section("__cstring")
    content = bytes(section.content) if section else b""
    return frozenset(literal.decode(errors="replace") for literal in content.split(b"\0"))
