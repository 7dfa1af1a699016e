"""Calls of Llama 3.1 and later: JSON that is the whole answer, or that follows a token.

{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}
<|python_tag|>{"name": "f", "parameters": {"x": 1}}
<|python_tag|>brave_search.call(query="x")
"""

import re
from collections.abc import Sequence
from typing import Any

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.format import Format
from mlx_paged.formats.grammar import Function, json_rule
from mlx_paged.formats.json_text import members
from mlx_paged.formats.json_tools import call_of
from mlx_paged.formats.marks import Marks, quoted
from mlx_paged.formats.pythonic import PythonLiterals
from mlx_paged.formats.scan import Calls, Scan, Steps
from mlx_paged.formats.schemas import Tools


class Llama3(Format):
    """JSON objects with semicolons between."""

    name = "llama3"
    aliases = ("llama3_json",)
    tokens = "<|python_tag|>", "<|eom_id|>"
    first_openers = ("{",)

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.tag = marks.code("<|python_tag|>")
        self.openers = (self.tag,)
        self._built_in = _BuiltIn(marks, None)

    def call(self, scan: Scan, tools: Tools) -> Calls:
        is_tagged = yield from scan.maybe(self.tag)
        yield from scan.space()
        if is_tagged and not (yield from scan.maybe("{")):
            scan.at = 0
            calls = yield from self._built_in.call(scan, tools)
            return calls
        scan.at -= is_tagged
        calls = [(yield from self._one(scan, tools, is_tagged))]
        while True:
            scan.keep(calls)
            after = scan.at
            yield from scan.space()
            is_next = yield from scan.maybe(";")
            yield from scan.space()
            if not is_next or (scan.is_ended and scan.at == len(scan.text)):
                scan.at = after if not is_next or scan.is_cut else scan.at
                return calls
            calls.append((yield from self._one(scan, tools, is_tagged)))

    def _one(self, scan: Scan, tools: Tools, is_tagged: bool) -> Steps[Call]:
        """Read an object. Without the token it is a call only if it has arguments."""
        text = self.marks.plain((yield from scan.json("{")))
        keys = {key for key, _ in members(text)}
        call = call_of(text)
        if not is_tagged and not (
            keys & {"parameters", "arguments"} and tools.is_certain(call.name)
        ):
            raise NoCall
        return call

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        more = '("; " object)*' if several else ""
        named = " | ".join(f"object_{i}" for i in range(len(functions)))
        rules = [f"calls: object {more}", f"object: {named}"]
        for i, function in enumerate(functions):
            head = quoted(f'{{"name": {quoted(function.name)}, "parameters": ')
            rules.append(f'object_{i}: {head} {json_rule(function.schema)} "}}"')
        return rules


class _BuiltIn(PythonLiterals):
    """A call of a tool that the models know without its declaration."""

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        tag = marks.code("<|python_tag|>")
        self.openers = (tag,)
        self.start = re.compile(rf"{re.escape(tag)}\s*")
        self.function = re.compile(r"(?P<name>\w+)\.call\(")
        self.between = re.compile(r"(?!)")
        self.stop = re.compile(r"")
        self.end_mark = ""
        self.is_bare = True
