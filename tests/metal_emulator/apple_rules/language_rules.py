"""What of C++ is not in Metal 3, or is in it with another meaning."""

import re
from collections.abc import Iterator

from .. import toolchain
from ..language import threadgroup_variables
from ..language.declarations import Kind
from ..typecheck import parse_diagnostics
from .source import MetalSource

Found = Iterator[tuple[str, str]]

_INCLUDE = re.compile(r"^\s*#\s*include\s*<(metal_\w+)>", re.MULTILINE)
_HEADERS = {
    "metal_simdgroup": re.compile(r"simd_\w+|simdgroup_barrier"),
    "metal_simdgroup_matrix": re.compile(r"simdgroup_(matrix|\w+8x8|load|store|multiply\w*)"),
    "metal_atomic": re.compile(r"atomic_\w+|memory_order_\w+"),
}
"""The headers that MLX's own kernels include for these names."""

_NEWER_ATTRIBUTES = frozenset({"maybe_unused", "nodiscard", "fallthrough"})


def ascii_text(source: MetalSource) -> Found:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if not line.isascii():
            odd = next(letter for letter in line if not letter.isascii())
            yield f"{source.name}:{number}", f"the text holds {odd!a}: MLX wants ASCII"


def includes(source: MetalSource) -> Found:
    """MLX compiles a text without a directory to search, and names come from headers only."""
    try:
        names = {token.text: i for i in range(len(source.written)) if (token := source.written[i])}
    except toolchain.CompileError as error:
        for diagnostic in parse_diagnostics(str(error)):
            yield str(diagnostic).split(": ")[0], diagnostic.message
        return
    included = set(_INCLUDE.findall(source.text))
    if "metal_stdlib" not in included:
        yield f"{source.name}:1", "<metal_stdlib> is not included"
    for header, pattern in _HEADERS.items():
        used = [index for name, index in names.items() if pattern.fullmatch(name)]
        if used and header not in included:
            first = min(used)
            name = source.written[first].text
            yield _written_place(source, first), f"<{header}> is not included, which has {name}"


def program_scope(source: MetalSource) -> Found:
    for variable in source.program_variables():
        words = source.tokens.words(variable.start, variable.stop)
        words = words[: words.index("=")] if "=" in words else words
        if "constant" not in words:
            place = source.place(variable.head)
            yield place, "a variable outside of functions belongs into the address space constant"


def static_locals(source: MetalSource) -> Found:
    for _, index in source.function_tokens():
        if source.tokens[index].text == "static":
            yield source.place(index), "Metal has no static variables in functions"


def gotos(source: MetalSource) -> Found:
    for _, index in source.function_tokens():
        if source.tokens[index].text == "goto":
            yield source.place(index), "Metal has no goto"


def long_doubles(source: MetalSource) -> Found:
    """The preprocessor has given `double` another name."""
    tokens = source.tokens
    for index in range(len(tokens) - 1):
        if tokens[index].text == "long" and "double" in tokens[index + 1].text:
            yield source.place(index), "Metal has no long double"


def cxx17(source: MetalSource) -> Found:
    """Metal 3 is C++14."""
    for index in range(2, len(source.written)):
        token = source.written[index]
        if token.text in _NEWER_ATTRIBUTES and source.written[index - 2].text == "[":
            yield _written_place(source, index), f"C++14 has no attribute {token.text}"
    for diagnostic in parse_diagnostics(source.tree.errors):
        if "incompatible with C++ standards before C++17" in diagnostic.message:
            place, _, message = str(diagnostic).partition(": ")
            yield place, message


def kernel_before_template(source: MetalSource) -> Found:
    for kernel in source.kernels:
        declaration = kernel.declaration
        first = source.tokens.following(declaration.start)
        words = [a.name for a in source.attributes.between(declaration.start, first)]
        if declaration.is_template and words:
            yield source.place(first), f"[[{words[0]}]] stands before the word template"


def inner_threadgroup_variables(source: MetalSource) -> Found:
    tokens = source.tokens
    for variable in threadgroup_variables.find(tokens, source.declarations):
        function = variable.function
        assert function.kind is Kind.FUNCTION and function.body is not None
        opened = [i for i in range(function.body + 1, variable.start) if tokens[i].text == "{"]
        if any(tokens.closing(index) > variable.start for index in opened):
            name = variable.declarators[0][0]
            yield source.place(variable.start), f"threadgroup variable {name} is in an inner block"


def _written_place(source: MetalSource, index: int) -> str:
    return source.written.location(index).rpartition("/")[2]
