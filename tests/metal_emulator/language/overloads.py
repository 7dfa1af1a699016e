"""Erasing address spaces: what remains must not be declared twice.

`f(device T*)` and `f(threadgroup T*)` become the same function, of which one is kept. That is right
only if both do the same, so overloads that do not are refused.
"""

from .declarations import Declaration, Kind
from .tokens import ADDRESS_SPACES, TokenList, TranslationError

_END_OF_QUALIFIERS = frozenset({":", "=", "{", ";", "->"})


def drop_address_space_overloads(tokens: TokenList, declarations: list[Declaration]) -> None:
    """Keep the first of the declarations that are the same without their address spaces."""
    _drop_in_scope(tokens, declarations, {})


def erase_member_qualifiers(tokens: TokenList, declarations: list[Declaration]) -> None:
    """`int f() const device;` loses its `device`: C++ has no place for it there."""
    for declaration in declarations:
        for function in declaration.walk():
            for index in _trailing(tokens, function):
                if tokens[index].text in ADDRESS_SPACES:
                    tokens.erase(index, index + 1)


def _drop_in_scope(
    tokens: TokenList, declarations: list[Declaration], seen: dict[str, Declaration]
) -> None:
    namespaces: dict[tuple[str, ...], dict[str, Declaration]] = {}
    for declaration in declarations:
        if declaration.kind is Kind.NAMESPACE:
            names = tuple(tokens.words(declaration.head, declaration.body or 0))
            _drop_in_scope(tokens, declaration.members, namespaces.setdefault(names, {}))
            continue
        if declaration.kind is Kind.OTHER and declaration.parameters is None:
            continue
        signature = _signature(tokens, declaration)
        first = seen.get(signature)
        if first is None or declaration.kind is Kind.INSTANTIATION:
            seen[signature] = declaration
            _drop_in_scope(tokens, declaration.members, {})
        elif declaration.kind is Kind.FUNCTION and first.kind is Kind.OTHER:
            seen[signature] = declaration  # declared before, defined here
        elif declaration.kind is Kind.OTHER and first.kind is Kind.FUNCTION:
            continue  # declared again
        elif _without_spaces(tokens, declaration) == _without_spaces(tokens, first):
            tokens.erase(declaration.start, declaration.stop)
        else:
            raise TranslationError(
                f"{tokens.location(declaration.head)}: {declaration.name} and the overload at "
                f"{tokens.location(first.head)} differ in their address spaces and in what they do"
            )


def _signature(tokens: TokenList, declaration: Declaration) -> str:
    if declaration.kind is Kind.CLASS and declaration.body is not None:
        words = tokens.words(declaration.start, declaration.body)
    elif declaration.parameters is not None:
        words = tokens.words(declaration.start, tokens.closing(declaration.parameters) + 1)
        words += [tokens[i].text for i in _trailing(tokens, declaration)]
    else:
        words = tokens.words(declaration.start, declaration.stop)
    return " ".join(word for word in words if word not in ADDRESS_SPACES)


def _trailing(tokens: TokenList, declaration: Declaration) -> list[int]:
    """The qualifiers behind the parameter list."""
    if declaration.parameters is None:
        return []
    indices = []
    for index in tokens.present(tokens.closing(declaration.parameters) + 1, declaration.stop):
        if tokens[index].text in _END_OF_QUALIFIERS:
            break
        indices.append(index)
    return indices


def _without_spaces(tokens: TokenList, declaration: Declaration) -> list[str]:
    words = tokens.words(declaration.start, declaration.stop)
    return [word for word in words if word not in ADDRESS_SPACES]
