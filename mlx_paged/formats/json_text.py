"""JSON as the model wrote it: finds the end of a value in text that comes in pieces."""

import json
import re
from math import isinf

from mlx_paged.formats.events import NoCall

MAX_DEPTH = 200  # of nested values; clients and templates read them with recursion
MAX_DIGITS = 4000  # of a number; Python reads no integer with more than 4,300

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = "[0-9a-fA-F]"
_PAIR = rf"u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"  # half of it is no character
_ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}|{_PAIR})')
_PARTS_OF_ESCAPE = re.compile(
    rf"\\(?:u(?:{_HEX}{{0,3}}|[dD][89abAB]{_HEX}{{2}}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?)?)?"
)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DIGITS = re.compile(r"[-+.0-9eE]*")
_WORDS = ("true", "false", "null")
_decoder = json.JSONDecoder()


class JsonScan:
    """Follows one JSON value (RFC 8259) through a text. NaN and numbers beyond the range of a
    double are not JSON; nothing is converted."""

    def __init__(self) -> None:
        self._stack: list[str] = []  # closing brackets of the open values
        self._expects = "value"  # or: "key", "colon", "comma", "string", "done"
        self._may_close = False  # whether the innermost value may end here though it is empty
        self._is_key = False  # whether the open string is a key

    def feed(self, text: str, at: int, is_end: bool) -> tuple[int, bool]:
        """Read on at `at`. Returns how far it was read, and whether the value is complete.

        Args:
            is_end: no more text follows.

        Raises:
            NoCall: the text is not JSON.
        """
        while self._expects != "done":
            if self._expects != "string":
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                return at, False
            after = self._step(text, at, is_end)
            if after is None:
                return at, False
            at = after
        return at, True

    def _step(self, text: str, at: int, is_end: bool) -> int | None:
        """Read one part. Returns the position after it, None if more text is needed for it."""
        if self._expects == "string":
            return self._string(text, at)
        first = text[at]
        if self._may_close or self._expects == "comma":
            if first == self._stack[-1]:
                self._stack.pop()
                return self._ended(at + 1)
            if self._expects == "comma":
                self._require(first == ",")
                self._expects = "key" if self._stack[-1] == "}" else "value"
                return at + 1
        self._may_close = False
        if self._expects == "colon":
            self._require(first == ":")
            self._expects = "value"
            return at + 1
        if first == '"':
            self._is_key = self._expects == "key"
            self._expects = "string"
            return at + 1
        self._require(self._expects == "value")
        return self._value(text, at, is_end)

    def _value(self, text: str, at: int, is_end: bool) -> int | None:
        """Read the beginning of an object or an array, or another value that is no string."""
        first = text[at]
        if first in "{[":
            self._require(len(self._stack) < MAX_DEPTH)
            self._stack.append("}" if first == "{" else "]")
            self._expects, self._may_close = ("key" if first == "{" else "value"), True
            return at + 1
        if first in "-0123456789":
            end = _DIGITS.match(text, at).end()  # type: ignore[union-attr]
            self._require(end - at <= MAX_DIGITS)
            if end == len(text) and not is_end:
                return None
            self._require(is_number(text[at:end]))
            return self._ended(end)
        for word in _WORDS:
            if text.startswith(word, at):
                return self._ended(at + len(word))
            if word.startswith(text[at:]):
                return None
        raise NoCall

    def _string(self, text: str, at: int) -> int | None:
        end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        if end > at or end == len(text):
            return end
        if text[end] == '"':
            if not self._is_key:
                return self._ended(end + 1)
            self._expects, self._is_key = "colon", False
            return end + 1
        escape = _ESCAPE.match(text, end)
        if escape:
            return escape.end()
        self._require(_PARTS_OF_ESCAPE.fullmatch(text, end))
        return None

    def _ended(self, at: int) -> int:
        """A value has ended before `at`."""
        self._may_close = False
        self._expects = "comma" if self._stack else "done"
        return at

    @staticmethod
    def _require(condition: object) -> None:
        if not condition:
            raise NoCall


def is_number(text: str) -> bool:
    """Whether a text is a JSON number: an integer of any size, or within the range of a double."""
    found = _NUMBER.fullmatch(text)
    is_integer = text.lstrip("-").isdecimal()
    return bool(found) and len(text) <= MAX_DIGITS and (is_integer or not isinf(float(text)))


def is_json(text: str) -> bool:
    """Whether a text is one JSON value with nothing but white space around it."""
    try:
        at, is_whole = JsonScan().feed(text, 0, True)
    except NoCall:
        return False
    return is_whole and _SPACE.fullmatch(text, at) is not None


def members(text: str) -> list[tuple[str, str]]:
    """Keys and values of a JSON object, the values as they are written."""
    found = []
    at = text.index("{") + 1
    while text[at := _after_space(text, at)] != "}":
        key, at = _decoder.raw_decode(text, at)
        at = _after_space(text, _after_space(text, at) + 1)
        _, end = _decoder.raw_decode(text, at)
        found.append((key, text[at:end]))
        at = _after_space(text, end)
        at += text[at] == ","
    return found


def items(text: str) -> list[str]:
    """The values of a JSON array, as they are written."""
    found = []
    at = text.index("[") + 1
    while text[at := _after_space(text, at)] != "]":
        _, end = _decoder.raw_decode(text, at)
        found.append(text[at:end])
        at = _after_space(text, end)
        at += text[at] == ","
    return found


def written(value: object) -> str:
    """A value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]
