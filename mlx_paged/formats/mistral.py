"""Mistral's marks, with the name before the arguments or within a JSON list.

[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}
[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"x": 1}
[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "a1b2c3d4e"}]
"""

from collections.abc import Sequence
from typing import Any

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.format import Format
from mlx_paged.formats.grammar import Function, json_rule
from mlx_paged.formats.json_tools import calls_of, json_objects
from mlx_paged.formats.marks import Marks, is_token, quoted
from mlx_paged.formats.scan import MAX_HEAD, Calls, Scan, Steps
from mlx_paged.formats.schemas import Tools


class Mistral(Format):
    """A call has no mark at its end: its JSON ends it."""

    name = "mistral"
    tokens = ("[TOOL_CALLS]",)

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.start, self.args, self.own_id = (
            marks.code(mark) for mark in ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
        )
        self.openers = (self.start,)

    def call(self, scan: Scan, tools: Tools) -> Calls:
        yield from scan.take(self.start)
        yield from scan.space()
        if (yield from scan.maybe("[{")):
            scan.at -= len("[{")
            value = yield from scan.json()
            return calls_of(self.marks.plain(value))
        calls = [(yield from self._one(scan))]
        while True:
            after = scan.at
            yield from scan.space()
            if (yield from scan.maybe(self.start)):
                scan.at = after
                return calls
            try:  # another call may follow without a mark of its own
                calls.append((yield from self._one(scan)))
            except NoCall:
                scan.at = after
                return calls

    def _one(self, scan: Scan) -> Steps[Call]:
        """Read a name and its arguments."""
        name = yield from scan.name(self.args, self.own_id)
        own_id = None
        if (yield from scan.maybe(self.own_id)):
            own_id = self.marks.plain((yield from scan.until(self.args, MAX_HEAD)).strip())
        else:
            yield from scan.take(self.args)
        yield from scan.space()
        arguments = yield from scan.json("{")
        return Call(self.marks.plain(name), self.marks.plain(arguments), own_id)

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        start, args = self.marks.lark(self.start), self.marks.lark(self.args)
        if not is_token(self.args):  # an older model, which knows lists only
            more = '(", " object)*' if several else ""
            return [f'calls: {start} "[" object {more} "]"', *json_objects(functions)]
        named = " | ".join(f"call_{i}" for i in range(len(functions)))
        return [
            f"calls: call{'+' if several else ''}",
            f"call: {start} ({named})",
            *(
                f"call_{i}: {quoted(function.name)} {args} {json_rule(function.schema)}"
                for i, function in enumerate(functions)
            ),
        ]
