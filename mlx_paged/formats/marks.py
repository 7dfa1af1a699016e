"""Marks divide an answer. Where a mark is a token of the model, only this token is the mark."""

import json
from collections.abc import Mapping

FIRST = 0xD800
"""The first of the code points that stand for tokens. They are surrogates, which no decoder of
UTF-8 gives, so that they cannot be text."""


class Marks:
    """Answers as coded text: each mark that is one token is one character, which nothing else is.

    Args:
        vocab: token ids by text. A mark that has none is found by its text.
    """

    def __init__(self, vocab: Mapping[str, int]) -> None:
        self._vocab = vocab
        self._codes: dict[str, str] = {}
        self._by_token: dict[int, tuple[str, str]] = {}
        self._texts: dict[int, str] = {}

    def code(self, mark: str) -> str:
        """What stands for a mark in coded text: one character, or its text if it is no token."""
        token = self._vocab.get(mark)
        if token is None:
            return mark
        if mark not in self._codes:
            point = FIRST + len(self._codes)
            self._codes[mark] = chr(point)
            self._by_token[token] = mark, chr(point)
            self._texts[point] = mark
        return self._codes[mark]

    def coded(self, token: int | None, text: str) -> str:
        """The coded text that a token adds. `text` is what the detokenizer adds with this token; a
        token that ends an answer may have none."""
        if token not in self._by_token:
            return text
        mark, code = self._by_token[token]
        return text.removesuffix(mark) + code

    def coded_text(self, text: str) -> str:
        """The coded text of a text that the model's tokenizer has encoded as a whole."""
        for mark, code in self._codes.items():
            text = text.replace(mark, code)
        return text

    def plain(self, coded: str) -> str:
        """The text of coded text."""
        return coded.translate(self._texts)

    def length(self, coded: str) -> int:
        """Characters of the text of coded text."""
        marks = () if coded.isascii() else self._texts.items()
        return len(coded) + sum(coded.count(chr(point)) * (len(mark) - 1) for point, mark in marks)

    def lark(self, coded: str) -> str:
        """Coded text as a grammar for llguidance has it: tokens by their ids, quoted text."""
        parts, rest = list[str](), ""
        for character in coded:
            if ord(character) in self._texts:
                parts += [quoted(rest)] if rest else []
                parts.append(f"<[{self._vocab[self._texts[ord(character)]]}]>")
                rest = ""
            else:
                rest += character
        return " ".join([*parts, *([quoted(rest)] if rest else [])])


def is_token(coded: str) -> bool:
    """Whether a part of coded text is a token, so that no other text is like it."""
    return any(FIRST <= ord(character) <= 0xDFFF for character in coded)


def quoted(text: str) -> str:
    """A text as a string of a grammar for llguidance."""
    return json.dumps(text, ensure_ascii=False)
