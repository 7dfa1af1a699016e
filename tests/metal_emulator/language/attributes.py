"""Metal's [[attributes]], taken out of the text and remembered by where they were."""

from dataclasses import dataclass

from .tokens import TokenList

_STANDARD = frozenset({"deprecated", "fallthrough", "likely", "maybe_unused", "nodiscard"})
_STANDARD |= {"noreturn", "unlikely", "clang", "gnu"}


@dataclass(frozen=True, slots=True)
class Attribute:
    """`name` or `name(arguments)`."""

    name: str
    arguments: tuple[str, ...]


class Attributes:
    """All Metal attributes of a source; building it erases them from the tokens."""

    def __init__(self, tokens: TokenList) -> None:
        self._by_index: dict[int, list[Attribute]] = {}
        index = 0
        while index < len(tokens):
            if _is_attribute(tokens, index):
                stop = tokens.closing(index) + 1
                self._by_index[index] = _parse(tokens.words(index + 2, stop - 2))
                tokens.erase(index, stop)
                index = stop
            else:
                index += 1

    def between(self, start: int, stop: int) -> list[Attribute]:
        """The attributes that stood in the tokens [start, stop)."""
        indices = (i for i in range(start, stop) if i in self._by_index)
        return [attribute for i in indices for attribute in self._by_index[i]]


def _is_attribute(tokens: TokenList, index: int) -> bool:
    if index + 2 >= len(tokens) or tokens[index].text != "[" or tokens[index + 1].text != "[":
        return False
    if tokens[index + 1].space or tokens.closing(index) != tokens.closing(index + 1) + 1:
        return False
    return tokens[index + 2].text not in _STANDARD


def _parse(words: list[str]) -> list[Attribute]:
    """`buffer(3), function_constant(has_mask)` as two attributes."""
    attributes: list[Attribute] = []
    name, depth = "", 0
    arguments: list[str] = []
    for word in [*words, ","]:
        if word == "," and depth == 0:
            attributes.append(Attribute(name, tuple(arguments)))
            name = ""
            arguments.clear()
            continue
        depth -= word == ")"
        if depth > 0:
            arguments.append(word)
        elif word not in "()":
            name += word
        depth += word == "("
    return attributes
