"""Calls of Gemma 4: keys without quotes, and strings between tokens.

<|tool_call>call:f{x:<|"|>text<|"|>,n:2,d:{a:[true,null]}}<tool_call|>
"""

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from mlx_paged.formats.json_text import is_json, is_number, written
from mlx_paged.formats.literals import Literals
from mlx_paged.formats.marks import Marks, quoted

_WORDS = {"true": "true", "false": "false", "null": "null"} | {
    "True": "true",
    "False": "false",
    "None": "null",
}
_BARE = re.compile(r"[^,:{}\[\]]*(?::[^,{}\[\]]*)?")
_KEY = re.compile(r"\s*(?P<key>[^,:{}\[\]]*):\s*")
_QUOTED_KEY = re.compile(r"\s*(?P<key>\"[^\":,{}\[\]]*\")\s*:\s*")
_COLON = re.compile(r"\s*:\s*")
_JSON_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"(?=\s*[,\]}])')


class Gemma4(Literals):
    """A text that is neither a number nor a word of JSON is a string, also without its marks."""

    name = "gemma4"
    tokens: ClassVar[tuple[str, ...]] = ("<|tool_call>", "<tool_call|>", '<|"|>')

    has_string_marks = True

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.begin_mark, self.end_mark, self.quote = map(marks.code, self.tokens)
        self.openers = (self.begin_mark,)
        self.start = re.compile(rf"{re.escape(self.begin_mark)}\s*")
        self.function = re.compile(r"call:(?P<name>[^\s{}:,]+)\{")
        self.between = re.compile(r"\s*(?=call:)")
        self.stop = re.compile(rf"\s*{re.escape(self.end_mark)}")
        self.argument = _KEY
        self.close = "}"

    @property
    def is_shared(self) -> bool:
        return False

    def ends_of_string(self, text: str, at: int, is_lenient: bool) -> Iterator[int]:
        if not text.startswith(self.quote, at):
            found = _JSON_STRING.match(text, at)
            if found and is_json(self.marks.plain(found[0])):
                yield found.end()
            return
        at += len(self.quote)
        while (found_at := text.find(self.quote, at)) >= 0:
            yield found_at + len(self.quote)
            if not is_lenient:
                return
            at = found_at + 1

    def string(self, text: str) -> str:
        if not text.startswith(self.quote):
            return self.marks.plain(text)
        return written(self.marks.plain(text[len(self.quote) : -len(self.quote)]))

    def scalar(self, text: str, at: int) -> tuple[str, int] | None:
        found = _BARE.match(text, at)
        value = found[0].strip() if found else ""
        if not found or not value or self.quote in value or self.end_mark in value:
            return None
        plain = self.marks.plain(value)
        known = _WORDS.get(plain, plain if is_number(plain) else written(plain))
        return known, found.end()

    def key(self, text: str, at: int) -> tuple[str, int] | None:
        end = None
        if text.startswith(self.quote, at):
            end = next(self.ends_of_string(text, at, False), None)
        if end is not None:
            return json.loads(self.string(text[at:end])), _after_colon(text, end)
        json_key = _QUOTED_KEY.match(text, at)
        if json_key and is_json(self.marks.plain(json_key["key"])):
            return json.loads(self.marks.plain(json_key["key"])), json_key.end()
        found = _KEY.match(text, at)
        return (self.marks.plain(found["key"]), found.end()) if found else None

    def call_rules(self, several: bool) -> tuple[str, str, str, str]:
        start, end = self.marks.lark(self.begin_mark), self.marks.lark(self.end_mark)
        more = f"({end} {start} function)*" if several else ""
        return f"{start} function {more} {end}", '"call:"', '"{"', '"}"'

    def written_values(self, key: str) -> tuple[str, str | None]:
        return quoted(f"{key}:"), self.marks.lark(self.quote)


def _after_colon(text: str, at: int) -> int:
    found = _COLON.match(text, at)
    return found.end() if found else len(text) + 1
