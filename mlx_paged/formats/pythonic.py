"""Calls as Python writes them, in a list: Llama 3.2 and 4, Gemma 3 and others.

[f(x="1", n=2), g()]
"""

import ast
import re
from collections.abc import Iterator
from math import isfinite
from typing import ClassVar

from mlx_paged.formats.events import NoCall
from mlx_paged.formats.json_text import MAX_DIGITS, is_number, written
from mlx_paged.formats.literals import ARGUMENTS, Literals
from mlx_paged.formats.scan import Calls, Scan
from mlx_paged.formats.schemas import Tools
from mlx_paged.formats.searched import State, after_space

_NAME = r"(?P<name>[^\s()\[\]{},=:;'\"`]+)"
_WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_WORD = re.compile(r"[A-Za-z]+(?!\w)")
_NUMBER = re.compile(r"[-+]?\s*[0-9.](?:[eE][-+]?[0-9_]+(?!\w)|[0-9A-Za-z_.])*")
_PREFIX = re.compile(r"(?P<raw>[rR]?)[uU]?(?P<quote>\"\"\"|'''|\"|')")
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|[\\'\"abfnrtv\n]|[0-7]{1,3}"
    r"|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
)


class PythonLiterals(Literals):
    """Literals of Python. The words of JSON are literals, too."""

    argument = re.compile(r"\s*(?P<key>[^\s()\[\]{},=:;'\"`]+)\s*=\s*")
    function = re.compile(rf"{_NAME}\(")
    between = re.compile(r"\s*,\s*")
    close = ")"

    def ends_of_string(self, text: str, at: int, is_lenient: bool) -> Iterator[int]:
        opened = _PREFIX.match(text, at)
        if not opened:
            return
        quote, at = opened["quote"], opened.end()
        while True:
            found = text.find(quote, at)
            slash = text.find("\\", at, found if found >= 0 else None)
            if slash >= 0:
                at = slash + 2
                continue
            if found < 0:
                return
            yield found + len(quote)
            if not is_lenient:
                return
            at = found + 1

    def _may_quote(self, state: State) -> bool:
        return state.stack == ARGUMENTS

    def string(self, text: str) -> str:
        opened = _PREFIX.match(text)
        assert opened is not None
        inner = self.marks.plain(text[opened.end() : -len(opened["quote"])])
        return written(inner if opened["raw"] else unescaped(inner))

    def scalar(self, text: str, at: int) -> tuple[str, int] | None:
        word = _WORD.match(text, at)
        if word:
            found = _WORDS.get(word[0])
            return (found, word.end()) if found else None
        number = _NUMBER.match(text, at)
        value = number and number_of(number[0])
        return (value, number.end()) if number and value else None

    def key(self, text: str, at: int) -> tuple[str, int] | None:
        end = next(self.ends_of_string(text, at, False), None)
        if end is not None:
            key = ast.literal_eval(self.string(text[at:end]))
        else:
            found = self.scalar(text, at)
            if not found:
                return None
            key, end = found
        colon = after_space(text, end)
        return (key, colon + 1) if text[colon : colon + 1] == ":" else None


class Pythonic(PythonLiterals):
    """A list without marks, which is the whole answer."""

    name = "pythonic_list"
    aliases: ClassVar[tuple[str, ...]] = ("gemma3",)
    first_openers: tuple[str, ...] = ("[",)
    is_bare = True
    start = re.compile(r"\[\s*")
    stop = re.compile(r"\s*,?\s*\]")
    end_mark = "]"
    cut = re.compile(rf"\s*(?:,\s*(?:{_NAME}(?:\(.*)?)?)?", re.DOTALL)
    _beginning = re.compile(rf"\[\s*(?:{_NAME})?")

    def _may_begin(self, text: str) -> bool:
        return self._beginning.fullmatch(text) is not None

    def call(self, scan: Scan, tools: Tools) -> Calls:
        calls = yield from super().call(scan, tools)
        if not all(tools.is_certain(call.name) for call in calls):
            raise NoCall
        return calls

    def call_rules(self, several: bool) -> tuple[str, str, str, str]:
        more = '(", " function)*' if several else ""
        return f'"[" function {more} "]"', "", '"("', '")"'


def unescaped(text: str) -> str:
    """The text of a string between its quotes. What is no escape stays as it is written, and so
    does half of a pair of surrogates, which is no character."""
    return _ESCAPE.sub(_escaped, text)


def _escaped(escape: re.Match[str]) -> str:
    if escape[0] == "\\\n":
        return ""
    try:
        found = str(ast.literal_eval(f'"{escape[0]}"'))
        return found.encode("utf-16", "surrogatepass").decode("utf-16")
    except (SyntaxError, UnicodeDecodeError):
        return escape[0]


def number_of(text: str) -> str | None:
    """The JSON of a number of Python; None if there is none."""
    text = re.sub(r"^([-+])\s*", r"\1", text)
    if is_number(text):
        return text
    if len(text) > MAX_DIGITS:
        return None
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return repr(number) if isfinite(number) else None
