"""What C++ for OpenCL lets pass and Metal does not.

Pointers and references of no address space; threadgroup variables outside of kernels; lambda
expressions, which are not in Metal 3 (MLX has some, in its sources for Metal 4). What is
right has to be so in each version that MLX asks for (`apple_rules/version_rules.py`).
"""

from collections.abc import Iterator
from pathlib import Path

from . import kernels, threadgroup_variables
from .attributes import Attributes
from .declarations import Declaration, Kind, parse
from .kernels import split_list
from .tokens import ADDRESS_SPACES, TokenList

_INDIRECTIONS = frozenset({"*", "&"})
_QUALIFIERS = frozenset({"const", "constexpr", "static", "typename", "volatile"})
_AFTER_DECLARED_NAME = frozenset({"=", ";", ",", "[", ":"})
_CASTS = frozenset({"reinterpret_cast", "static_cast", "const_cast"})


def violations(source: str) -> list[str]:
    """The places in preprocessed Metal `source` that break a rule, as "file:line: message"."""
    tokens = TokenList(source)
    attributes = Attributes(tokens)
    declarations = parse(tokens)
    kernel_starts = {
        kernel.declaration.start
        for kernel in kernels.find_functions(tokens, attributes, declarations)
    }
    places_of_bare = bare(tokens, declarations)
    found = [(index, "a pointer or reference needs an address space") for index in places_of_bare]
    for variable in threadgroup_variables.find(tokens, declarations):
        if variable.function.start not in kernel_starts:
            found.append((variable.start, "threadgroup variables belong into kernels"))
    found += [(index, "Metal 3 has no lambda expressions") for index in _lambdas(tokens)]
    places = [(Path(tokens.location(i)).name, message) for i, message in sorted(set(found))]
    return [f"{place}: {message}" for place, message in places]


def _lambdas(tokens: TokenList) -> Iterator[int]:
    for index in tokens.present(0, len(tokens)):
        before = tokens[tokens.preceding(index - 1)]
        begins_operand = before.kind == "symbol" and before.text not in (")", "]", ">")
        if tokens[index].text == "[" and (begins_operand or before.text == "return"):
            after = tokens[tokens.following(tokens.skip(index))]
            if after.text in ("(", "{"):
                yield index


def bare(tokens: TokenList, declarations: list[Declaration]) -> Iterator[int]:
    """Where pointers and references without an address space begin."""
    for declaration in (d for top in declarations for d in top.walk()):
        if declaration.kind in (Kind.NAMESPACE, Kind.INSTANTIATION, Kind.CLASS):
            continue
        if tokens[declaration.head].text == "static_assert":
            continue
        if declaration.parameters is None:  # a variable, a member or a typedef
            yield from _bare_statement(tokens, _behind_keyword(tokens, declaration.head))
            continue
        yield from _bare_return_type(tokens, declaration)
        for start, stop in split_list(tokens, declaration.parameters):
            yield from _bare_type(tokens, start, stop)
        if declaration.body is not None:
            yield from _bare_in_body(tokens, declaration.body + 1, declaration.stop - 1)


def _bare_in_body(tokens: TokenList, start: int, stop: int) -> Iterator[int]:
    for index in tokens.present(start, stop):
        before = tokens[tokens.preceding(index - 1)].text
        in_for = before == "(" and tokens[tokens.preceding(index - 2)].text == "for"
        if before in ("{", "}", ";") or in_for:
            yield from _bare_statement(tokens, _behind_keyword(tokens, index))
        if tokens[index].text in _CASTS:
            less = tokens.following(index + 1)
            yield from _bare_type(tokens, less + 1, tokens.skip_template_arguments(less) - 1)
        elif tokens[index].text == "(":
            yield from _bare_cast(tokens, index)


def _behind_keyword(tokens: TokenList, index: int) -> int:
    return tokens.following(index + 1) if tokens[index].text == "typedef" else index


def _bare_type(tokens: TokenList, start: int, stop: int) -> Iterator[int]:
    """A type, perhaps with a declared name, up to its default value."""
    words = _words_up_to("=", tokens, start, stop)
    if _INDIRECTIONS & words and not ADDRESS_SPACES & words:
        yield tokens.following(start)


def _bare_return_type(tokens: TokenList, declaration: Declaration) -> Iterator[int]:
    assert declaration.parameters is not None
    words = _words_up_to("operator", tokens, declaration.head, declaration.parameters)
    if _INDIRECTIONS & words and not (ADDRESS_SPACES | {"="}) & words:
        yield declaration.head


def _words_up_to(end: str, tokens: TokenList, start: int, stop: int) -> set[str]:
    """The words of a type, without its template arguments."""
    words: set[str] = set()
    index = tokens.following(start)
    while index < stop and tokens[index].text != end:
        end_of_arguments = None
        if tokens[index].text == "<":
            end_of_arguments = tokens.template_arguments_end(index)
        words.add(tokens[index].text)
        index = tokens.following(end_of_arguments or index + 1)
    return words


def _bare_statement(tokens: TokenList, index: int) -> Iterator[int]:
    """A statement that begins like `const T<4>* name =`."""
    end = _skip_type(tokens, index)
    after = end
    while tokens[after].text in _INDIRECTIONS | {"const"}:
        after = tokens.following(after + 1)
    has_indirection = bool(_INDIRECTIONS & set(tokens.words(end, after)))
    is_declared = end > index and has_indirection and tokens[after].kind == "name"
    if is_declared and tokens[tokens.following(after + 1)].text in _AFTER_DECLARED_NAME:
        yield index


def _bare_cast(tokens: TokenList, index: int) -> Iterator[int]:
    """`(T*)`"""
    end = _skip_type(tokens, tokens.following(index + 1))
    stop = tokens.closing(index)
    words = tokens.words(end, stop)
    if end > index + 1 and words and set(words) <= {"*", "&"}:
        yield index


def _skip_type(tokens: TokenList, index: int) -> int:
    """Behind a type without an address space; unmoved if there is none."""
    start = index
    while tokens[index].text in _QUALIFIERS:
        index = tokens.following(index + 1)
    while tokens[index].kind == "name" and tokens[index].text not in ADDRESS_SPACES | _CASTS:
        index = tokens.following(index + 1)
        if tokens[index].text == "<":
            end = tokens.template_arguments_end(index)
            if end is None:
                return start
            index = tokens.following(end)
        if tokens[index].text == "const":
            return tokens.following(index + 1)
        if tokens[index].text != "::":
            return index
        index = tokens.following(index + 1)
    return start
