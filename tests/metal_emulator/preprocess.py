"""The preprocessor pass: macros and includes are resolved, Metal's keywords stay."""

from collections.abc import Sequence
from pathlib import Path

from . import toolchain
from .cache import directory

_DEVICE = Path(__file__).parent / "device"

_SYSTEM_HEADERS = (
    *("array", "atomic", "common", "compute", "geometric", "integer", "limits", "logging"),
    *("math", "matrix", "pack", "relational", "simdgroup", "simdgroup_matrix", "stdlib"),
    *("texture", "type_traits"),
)
"""<metal_stdlib> and the others: empty here, the emulator's own header comes in later."""


def preprocess(source: str, name: str, include_dirs: Sequence[Path]) -> str:
    """`source` without directives, except markers that tell files and lines.

    name: what the markers call the source itself.
    include_dirs: searched for #include "...".
    """
    arguments = ["-E", "-x", "c++", "-std=c++17", "-w", "-undef", "-nostdinc", "-nostdinc++"]
    # The language is Metal's C++: say so to sources that ask.
    arguments += ["-D__cplusplus=201703L", "-D__cpp_variable_templates=201304L"]
    arguments += ["-include", str(_DEVICE / "keywords.h"), "-I", str(_empty_system_headers())]
    arguments += [f"-I{directory}" for directory in include_dirs]
    return toolchain.clang(*arguments, "-", source=f'#line 1 "{name}"\n{source}')


def _empty_system_headers() -> Path:
    headers = directory() / "metal_headers"
    headers.mkdir(exist_ok=True)
    for name in _SYSTEM_HEADERS:
        (headers / f"metal_{name}").touch()
    return headers
