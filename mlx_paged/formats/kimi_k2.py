"""Kimi K2's section of calls, each with an identity of its own.

<|tool_calls_section_begin|>
<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>
<|tool_calls_section_end|>
"""

import re
from collections.abc import Sequence
from typing import Any

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.format import Format
from mlx_paged.formats.grammar import Function, json_rule
from mlx_paged.formats.marks import Marks, quoted
from mlx_paged.formats.scan import MAX_HEAD, Calls, Scan, Steps, checked_name
from mlx_paged.formats.schemas import Tools

_IDENTITY = re.compile(r"(?:functions\.)?(?P<name>\S+?)(?::\d+)?")


class KimiK2(Format):
    """The identity of a call is its name and its number in the chat; clients send it back."""

    name = "kimi_k2"
    tokens = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.start, self.begin_call, self.argument, self.end_call, self.end = (
            marks.code(f"<|{name}|>")
            for name in (
                "tool_calls_section_begin",
                "tool_call_begin",
                "tool_call_argument_begin",
                "tool_call_end",
                "tool_calls_section_end",
            )
        )
        self.openers = (self.start,)

    def call(self, scan: Scan, tools: Tools) -> Calls:
        yield from scan.take(self.start)
        calls = list[Call]()
        while True:
            yield from scan.space()
            if calls and not (yield from scan.maybe(self.begin_call)):
                yield from scan.close(self.end)
                return calls
            if not calls:
                yield from scan.take(self.begin_call)
            calls.append((yield from self._one(scan)))
            scan.keep(calls)

    def _one(self, scan: Scan) -> Steps[Call]:
        """Read a call after its mark."""
        yield from scan.space()
        own_id = self.marks.plain((yield from scan.until(self.argument, MAX_HEAD))).strip()
        found = _IDENTITY.fullmatch(own_id)
        if found is None:
            raise NoCall
        yield from scan.space()
        arguments = yield from scan.json("{")
        yield from scan.space()
        yield from scan.take(self.end_call)
        return Call(checked_name(found["name"]), self.marks.plain(arguments), own_id)

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        code = self.marks.lark
        named = " | ".join(f"call_{i}" for i in range(len(functions)))
        calls = f"call{'+' if several else ''}"
        rules = [
            f"calls: {code(self.start)} {calls} {code(self.end)}",
            f"call: {code(self.begin_call)} ({named}) {code(self.end_call)}",
        ]
        for i, function in enumerate(functions):
            head = f"{quoted(f'functions.{function.name}:')} /[0-9]{{1,3}}/ {code(self.argument)}"
            rules.append(f"call_{i}: {head} {json_rule(function.schema)}")
        return rules
