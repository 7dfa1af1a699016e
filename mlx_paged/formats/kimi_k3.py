"""Kimi K3's tags, which consist of tokens and names.

    <|open|>think<|sep|>A thought.<|close|>think<|sep|>
    <|open|>response<|sep|>The answer.<|close|>response<|sep|>
    <|open|>tools<|sep|>
    <|open|>call tool="f" index="1"<|sep|>
    <|open|>argument key="x" type="string"<|sep|>value<|close|>argument<|sep|>
    <|close|>call<|sep|>
    <|close|>tools<|sep|><|close|>message<|sep|>

An object may stand in the place of arguments:

    <|open|>json type="object"<|sep|>{"x": 1}<|close|>json<|sep|>
"""

import re
from collections.abc import Sequence
from typing import Any

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.format import Format
from mlx_paged.formats.grammar import Function, json_rule
from mlx_paged.formats.json_text import is_json, written
from mlx_paged.formats.json_tools import object_of
from mlx_paged.formats.marks import Marks, quoted
from mlx_paged.formats.scan import MAX_HEAD, Calls, Scan, Steps, checked_name
from mlx_paged.formats.schemas import Tools

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class KimiK3(Format):
    """A tag tells the type of a value."""

    name = "kimi_k3"
    tokens = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self._open, self._close, self._sep = (
            marks.code(mark) for mark in ("<|open|>", "<|close|>", "<|sep|>")
        )
        self.openers = (self._opens("tools"),)
        self.silent = self._opens("response"), self._closes("response"), self._closes("message")

    def _opens(self, name: str) -> str:
        return f"{self._open}{name}{self._sep}"

    def _closes(self, name: str) -> str:
        return f"{self._close}{name}{self._sep}"

    def call(self, scan: Scan, tools: Tools) -> Calls:
        yield from scan.take(self.openers[0])
        calls = list[Call]()
        while True:
            yield from scan.space()
            if calls and (yield from scan.maybe(self._closes("tools"))):
                return calls
            calls.append((yield from self._call(scan)))
            scan.keep(calls)

    def _call(self, scan: Scan) -> Steps[Call]:
        yield from scan.take(f"{self._open}call ")
        name = checked_name(
            self._attributes((yield from scan.until(self._sep, MAX_HEAD))).get("tool", "")
        )
        found: dict[str, str] = {}
        while True:
            yield from scan.space()
            if (yield from scan.maybe(self._closes("call"))):
                arguments = ", ".join(f"{written(key)}: {value}" for key, value in found.items())
                return Call(name, f"{{{arguments}}}")
            if (yield from scan.maybe(f"{self._open}json")):
                yield from scan.until(self._sep, MAX_HEAD)
                text = yield from scan.until(self._closes("json"))
                yield from scan.space()
                yield from scan.take(self._closes("call"))
                return Call(name, _object(self.marks.plain(text).strip()))
            yield from scan.take(f"{self._open}argument ")
            told = self._attributes((yield from scan.until(self._sep, MAX_HEAD)))
            text = self.marks.plain((yield from scan.until(self._closes("argument"))))
            if "key" not in told:
                raise NoCall
            is_text = told.get("type", "string") == "string" or not is_json(text)
            found[told["key"]] = written(text) if is_text else text.strip()

    def _attributes(self, text: str) -> dict[str, str]:
        """What the attributes of a tag say."""
        found = _ATTRIBUTE.findall(self.marks.plain(text))
        return {key: x.replace("&quot;", '"').replace("&amp;", "&") for key, x in found}

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        code = self.marks.lark
        named = " | ".join(f"call_{i}" for i in range(len(functions)))
        before = code(f'{self._sep}{self._open}json type="object"{self._sep}')
        first, last = code(self.openers[0]), code(self._closes("tools"))
        after = code(self._closes("json") + self._closes("call"))
        rules = [f"calls: {first} call{'+' if several else ''} {last}", f"call: {named}"]
        for i, function in enumerate(functions):
            name = function.name.replace("&", "&amp;").replace('"', "&quot;")
            begin, end = f'call tool="{name}" index="', '"'
            head = f"{code(self._open)} {quoted(begin)} /[1-9][0-9]?/ {quoted(end)}"
            rules.append(f"call_{i}: {head} {before} {json_rule(function.schema)} {after}")
        return rules


def _object(text: str) -> str:
    """A JSON object. Raises NoCall for another text."""
    if not is_json(text):
        raise NoCall
    return object_of(text)
