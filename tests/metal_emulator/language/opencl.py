"""Preprocessed Metal to C++ for OpenCL, which knows the same address spaces."""

import re

from . import constants, kernels, threadgroup_variables
from .attributes import Attributes
from .declarations import Declaration, Kind, parse
from .kernels import split_list
from .tokens import TokenList

_VECTOR_TYPE = re.compile(r"(u?char|u?short|u?int|u?long|bool|half|float|bfloat)[234]")
_BEFORE_A_TYPE_THAT_IS_NOT_CALLED = frozenset({".", "->", "struct"})
_KEYWORDS_BEFORE_EXPRESSIONS = frozenset({"return", "else", "const"})


def to_opencl(source: str) -> str:
    """C++ for OpenCL with the types of the preprocessed Metal `source`. It does not run."""
    tokens = TokenList(source)
    attributes = Attributes(tokens)
    declarations = parse(tokens)
    for constant, declaration in constants.find(tokens, attributes, declarations).items():
        text = f"extern constant {constant.type} {constant.name};"
        tokens.replace(declaration.start, declaration.stop, text)
    kernels.find_functions(tokens, attributes, declarations)
    for instantiation in kernels.find_instantiations(tokens, attributes, declarations):
        declaration, expression = instantiation.declaration, instantiation.expression
        text = f"template decltype({expression}) {expression};"
        tokens.replace(declaration.start, declaration.stop, text)
    threadgroup_variables.replace_all(tokens, declarations, address_space="threadgroup")
    _rewrite_vector_initialisers(tokens, declarations)
    _rewrite_vector_constructors(tokens)
    return tokens.text()


def _rewrite_vector_initialisers(tokens: TokenList, declarations: list[Declaration]) -> None:
    """`float2 v(x, y);` becomes `float2 v = emulator_make<float2>(x, y);`."""
    for function in (d for top in declarations for d in top.walk()):
        if function.kind is not Kind.FUNCTION or function.body is None:
            continue
        for index in tokens.present(function.body, function.stop):
            name = tokens.following(index + 1)
            open_at = tokens.following(name + 1)
            if (
                _VECTOR_TYPE.fullmatch(tokens[index].text)
                and tokens[name].kind == "name"
                and tokens[open_at].text == "("
                and len(split_list(tokens, open_at)) > 1
            ):
                tokens[open_at].text = f"= emulator_make<{tokens[index].text}>("


def _rewrite_vector_constructors(tokens: TokenList) -> None:
    """`float4(x, y)` and `vec<T, 4>(x, y)` become `emulator_make<...>(x, y)`."""
    for index in tokens.present(0, len(tokens)):
        token = tokens[index]
        if token.kind != "name" or _is_declared_type(tokens, index):
            continue
        after = tokens.following(index + 1)
        if _VECTOR_TYPE.fullmatch(token.text):
            if tokens[after].text == "(" and tokens[after + 1].text not in ("*", "&"):
                token.text = f"emulator_make<{token.text}>"
        elif token.text == "vec" and tokens[after].text == "<":
            end = tokens.skip_template_arguments(after)
            if tokens[tokens.following(end)].text == "(":
                token.text = "emulator_make<vec"
                tokens.append(end - 1, ">")


def _is_declared_type(tokens: TokenList, index: int) -> bool:
    before = tokens[tokens.preceding(index - 1)]
    if before.kind == "name":
        return before.text not in _KEYWORDS_BEFORE_EXPRESSIONS
    return before.text in _BEFORE_A_TYPE_THAT_IS_NOT_CALLED
