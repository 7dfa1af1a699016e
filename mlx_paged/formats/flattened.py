"""One regular expression for a grammar of Lark whose rules do not contain themselves.

A text within a JSON string is escaped, so that a grammar of the text is none of the string. For an
expression llguidance knows the string.
"""

import json
import re
from collections.abc import Iterator

MAX_LENGTH = 1 << 16  # characters of an expression

COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "NUMBER": r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}
"""Expressions of the terminals that a grammar may import from Lark's ``common``."""

_TOKENS = re.compile(
    r"(?P<space>\s+|//[^\n]*|#[^\n]*)"
    r'|(?P<string>"(?:[^"\\\n]|\\.)*"i?)'
    r"|(?P<expression>/(?:[^/\\\n]|\\.)+/[a-z]*)"
    r"|(?P<word>%?[?!]?[A-Za-z_]\w*(?:\.\w+)?)"
    r"|(?P<number>[0-9]+)"
    r"|(?P<mark>->|\.\.|[:|()\[\]?*+~,])"
    r"|(?P<other>.)",
    re.DOTALL,
)
_REPEATS = ("?", "*", "+")


def flattened(lark: str) -> str:
    """The expression of all texts of a grammar.

    Args:
        lark: a grammar in llguidance's form of Lark, whose first rule is ``start``.

    Raises:
        ValueError: a rule contains itself, or a part of the grammar has no expression.
    """
    if len(lark) > MAX_LENGTH:
        raise ValueError("it is too long")
    reader = _Reader(lark)
    try:
        return reader.expression("start")
    except RecursionError as error:
        raise ValueError("its rules are nested too deeply") from error


class _Reader:
    """Reads the definitions of a grammar, and writes the expression of a name."""

    def __init__(self, lark: str) -> None:
        self._tokens = [*_tokens(lark)]
        self._at = 0
        self._imported: dict[str, str] = {}
        self._begins = dict(self._definitions())
        self._open: list[str] = []  # names that are being written
        self._known: dict[str, str] = {}

    def expression(self, name: str) -> str:
        if name in self._imported:
            return f"(?:{self._imported[name]})"
        if name in self._open:
            raise ValueError(f"the rule {name:.80} contains itself")
        if name not in self._begins:
            raise ValueError(f"the rule {name:.80} is not defined")
        if name not in self._known:
            self._open.append(name)
            before, self._at = self._at, self._begins[name]
            self._known[name] = self._alternatives()
            self._at = before
            self._open.pop()
        return self._known[name]

    def _definitions(self) -> Iterator[tuple[str, int]]:
        """The names that are defined, and where their texts begin."""
        for i, (kind, text) in enumerate(self._tokens):
            if text == "%import":
                self._import(i + 1)
            elif kind == "word" and text.startswith("%"):
                raise ValueError(f"{text:.80} has no expression")
            elif kind == "word" and self._is(":", i + 1):
                yield text.lstrip("?!").partition(".")[0], i + 2

    def _import(self, at: int) -> None:
        path, end = self._tokens[at : at + 1], at + 1
        name = path[0][1] if path else ""
        names = [name.partition(".")[2]]
        if name == "common" and self._is("(", end):
            names, end = [], end + 1
            while end < len(self._tokens) and not self._is(")", end):
                kind, text = self._tokens[end]
                if kind != "word" and text != ",":
                    raise ValueError(f"{text:.80} is no name of an import")
                names += [text] if kind == "word" else []
                end += 1
        has_alias = self._is("->", end) and end + 1 < len(self._tokens)
        alias = self._tokens[end + 1][1] if has_alias else None
        for each in names:
            if not name.startswith("common") or each not in COMMON:
                raise ValueError(f"the import of {name:.80} is not known")
            self._imported[alias or each] = COMMON[each]

    def _is(self, mark: str, at: int) -> bool:
        return self._tokens[at : at + 1] == [("mark", mark)]

    def _takes(self, *marks: str) -> str | None:
        for mark in marks:
            if self._is(mark, self._at):
                self._at += 1
                return mark
        return None

    def _alternatives(self) -> str:
        found = [self._sequence()]
        length = len(found[0])
        while self._takes("|"):
            found.append(self._sequence())
            length += len(found[-1])
            if length > MAX_LENGTH:
                raise ValueError("its expression is too long")
        return f"(?:{'|'.join(found)})"

    def _sequence(self) -> str:
        found = ""
        while (item := self._item()) is not None:
            found += item
            if len(found) > MAX_LENGTH:
                raise ValueError("its expression is too long")
        if self._takes("->"):
            self._at += 1
        return found

    def _item(self) -> str | None:
        atom = self._atom()
        if atom is None:
            return None
        while mark := self._takes(*_REPEATS, "~"):
            if len(atom) > MAX_LENGTH:
                raise ValueError("its expression is too long")
            atom = f"(?:{atom})"
            if mark in _REPEATS:
                atom += mark
                continue
            low = self._number()
            high = self._number() if self._takes("..") else low
            atom += f"{{{low},{high}}}"
        return atom

    def _number(self) -> str:
        kind, text = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        if kind != "number":
            raise ValueError("a number of repetitions is missing")
        self._at += 1
        return text

    def _atom(self) -> str | None:
        if closes := {"(": ")", "[": "]"}.get(self._takes("(", "[") or ""):
            inner = self._alternatives()
            if not self._takes(closes):
                raise ValueError(f"{closes} is missing")
            return inner + ("?" if closes == "]" else "")
        if self._at == len(self._tokens):
            return None
        kind, text = self._tokens[self._at]
        if kind == "word" and (text.startswith("%") or self._is(":", self._at + 1)):
            return None
        if kind not in ("word", "string", "expression"):
            if text in ("|", ")", "]", "->"):
                return None
            raise ValueError(f"{text:.80} has no expression")
        self._at += 1
        if kind == "word":
            return self.expression(text)
        if kind == "expression":
            return _of_expression(text)
        return self._of_string(text)

    def _of_string(self, literal: str) -> str:
        folds, text = literal.endswith("i"), _string(literal.removesuffix("i"))
        if self._takes(".."):
            last = _string(self._tokens[self._at][1]) if self._at < len(self._tokens) else ""
            self._at += 1
            if len(text) != 1 or len(last) != 1:
                raise ValueError(f"the range of {literal:.80} needs two characters")
            return f"[{_rust(text)}-{_rust(last)}]"
        return f"(?i:{_rust(text)})" if folds else f"(?:{_rust(text)})"


def _tokens(lark: str) -> Iterator[tuple[str, str]]:
    for found in _TOKENS.finditer(lark):
        kind = str(found.lastgroup)
        if kind == "other":
            raise ValueError(f"{found[0]!r} has no expression")
        if kind != "space":
            yield kind, found[0]


def _string(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError as error:
        raise ValueError(f"the literal {literal:.80} is no JSON") from error


def _of_expression(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    kept, body = "".join(flag for flag in "imsx" if flag in flags), body.replace("\\/", "/")
    return f"(?{kept}:{body})"


def _rust(text: str) -> str:
    """A text in an expression of Rust's syntax."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):x}}}" for c in text)
