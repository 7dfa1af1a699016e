"""`threadgroup` variables inside kernels, which C++ has no storage class for."""

from dataclasses import dataclass

from .declarations import Declaration, Kind
from .tokens import TokenList

_QUALIFIERS = frozenset({"const", "static", "volatile"})


@dataclass(frozen=True, slots=True)
class ThreadgroupVariable:
    """The statement [start, stop) that declares `name` with the C++ type `type` and `extents`."""

    start: int
    stop: int
    declarators: tuple[tuple[str, str], ...]  # name, extents: ("scores", "[32][4]")
    type: str
    function: Declaration


def find(tokens: TokenList, declarations: list[Declaration]) -> list[ThreadgroupVariable]:
    """The statements that declare threadgroup variables, but not pointers or references."""
    found = []
    for function in (d for top in declarations for d in top.walk()):
        if function.kind is not Kind.FUNCTION or function.body is None:
            continue
        for index in range(function.body + 1, function.stop - 1):
            if tokens[index].text == "threadgroup" and _begins_statement(tokens, index):
                variable = _parse(tokens, index, function)
                if variable:
                    found.append(variable)
    return found


def replace_all(tokens: TokenList, declarations: list[Declaration], address_space: str) -> None:
    """Each variable becomes a reference to memory that the runtime provides.

    address_space: of the reference; "" where address spaces are erased.
    """
    number = 0
    for variable in find(tokens, declarations):
        texts = []
        for name, extents in variable.declarators:
            call = f"emulator::threadgroup_variable<{number}, {variable.type}{extents}>()"
            texts.append(f"{address_space} auto& {name} = {call};")
            number += 1
        tokens.replace(variable.start, variable.stop, " ".join(texts))


def _begins_statement(tokens: TokenList, index: int) -> bool:
    before = tokens.preceding(index - 1)
    while tokens[before].text in _QUALIFIERS:
        before = tokens.preceding(before - 1)
    return tokens[before].text in ("{", "}", ";", ":", ")")


def _parse(tokens: TokenList, start: int, function: Declaration) -> ThreadgroupVariable | None:
    first = tokens.following(start + 1)
    name_at = None
    index = first
    while tokens[index].text not in ("[", "=", ",", ";", "{", "("):
        if tokens[index].text in ("*", "&", "&&"):
            return None
        if tokens[index].text == "<":
            index = tokens.skip_template_arguments(index)
            continue
        if tokens[index].kind == "name":
            name_at = index
        index += 1
    if name_at is None or tokens[index].text == "(":
        return None
    type_words = [word for word in tokens.words(first, name_at) if word not in _QUALIFIERS]
    stop = index
    while tokens[stop].text != ";":
        stop = tokens.skip(stop)
    declarators = tuple(_declarators(tokens, name_at, stop))
    return ThreadgroupVariable(start, stop + 1, declarators, " ".join(type_words), function)


def _declarators(tokens: TokenList, index: int, stop: int) -> list[tuple[str, str]]:
    declarators = []
    while index < stop:
        name = tokens[index].text
        extents_from = index = index + 1
        while index < stop and tokens[index].text != ",":
            if tokens[index].text in ("=", "{"):
                tokens.fail(f"threadgroup variable {name} has an initialiser", index)
            index = tokens.skip(index)
        declarators.append((name, " ".join(tokens.words(extents_from, index))))
        index = tokens.following(index + 1)
    return declarators
