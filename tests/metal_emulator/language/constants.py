"""Function constants, and which of them a kernel depends on."""

from collections import defaultdict
from dataclasses import dataclass

from .attributes import Attributes
from .declarations import Declaration, Kind
from .tokens import ADDRESS_SPACES, TokenList

_NOT_A_TYPE = ADDRESS_SPACES | {"static", "const", "constexpr"}


@dataclass(frozen=True, slots=True)
class FunctionConstant:
    """`constant type name [[function_constant(index)]];`"""

    index: int
    name: str
    type: str


def find(
    tokens: TokenList, attributes: Attributes, declarations: list[Declaration]
) -> dict[FunctionConstant, Declaration]:
    """The function constants of a source, each with its declaration."""
    found = {}
    for declaration in (d for top in declarations for d in top.walk()):
        if declaration.kind is not Kind.OTHER or declaration.parameters is not None:
            continue
        for attribute in attributes.between(declaration.start, declaration.stop):
            if attribute.name != "function_constant":
                continue
            words = tokens.words(declaration.head, declaration.stop - 1)
            type_words = [word for word in words[:-1] if word not in _NOT_A_TYPE]
            index = int("".join(attribute.arguments))
            found[FunctionConstant(index, words[-1], " ".join(type_words))] = declaration
    return found


class Dependencies:
    """Which names each function, class and variable of a source mentions."""

    def __init__(
        self, tokens: TokenList, attributes: Attributes, declarations: list[Declaration]
    ) -> None:
        self._mentions: dict[str, set[str]] = defaultdict(set)
        for declaration in (d for top in declarations for d in top.walk()):
            if declaration.kind in (Kind.NAMESPACE, Kind.INSTANTIATION):
                continue
            names = self._mentions[declaration.name or _variable_name(tokens, declaration)]
            start, stop = declaration.start, declaration.stop
            names.update(t.text for i in range(start, stop) if (t := tokens[i]).kind == "name")
            for attribute in attributes.between(start, stop):
                names.update(attribute.arguments)

    def of(self, name: str) -> set[str]:
        """Every name that `name` mentions, directly or through what it mentions."""
        reached: set[str] = set()
        pending = {name}
        while pending:
            current = pending.pop()
            reached.add(current)
            pending |= self._mentions.get(current, set()) - reached
        return reached


def _variable_name(tokens: TokenList, declaration: Declaration) -> str:
    """The last name before the initialiser."""
    name = ""
    for index in tokens.present(declaration.head, declaration.stop):
        if tokens[index].text == "=":
            break
        if tokens[index].kind == "name":
            name = tokens[index].text
    return name
