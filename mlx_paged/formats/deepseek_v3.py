"""DeepSeek's marks: those of V3 and R1 with JSON in a fence, those of V3.1 with JSON alone.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"x": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>
<｜tool▁calls▁end｜>
"""

from collections.abc import Sequence
from typing import Any

from mlx_paged.formats.events import Call
from mlx_paged.formats.format import Format
from mlx_paged.formats.grammar import Function, json_rule
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.scan import Calls, Scan, Steps
from mlx_paged.formats.schemas import Tools


class DeepSeekV31(Format):
    """Several calls have one wrapper."""

    name = "deepseek_v31"
    tokens = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.start, self.begin_call, self.separator = map(marks.code, self.tokens)
        self.end_call, self.end = map(marks.code, ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"))
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
            yield from scan.space()
            yield from scan.take(self.end_call)
            scan.keep(calls)

    def _one(self, scan: Scan) -> Steps[Call]:
        """Read a call between its marks."""
        name = yield from scan.name(self.separator)
        yield from scan.take(self.separator)
        yield from scan.space()
        arguments = yield from scan.json("{")
        return Call(self.marks.plain(name), self.marks.plain(arguments))

    def _written(self, name: str) -> tuple[str, str]:
        """The coded texts around the arguments of a call."""
        return f"{self.begin_call}{name}{self.separator}", self.end_call

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        code = self.marks.lark
        calls = f"call{'+' if several else ''}"
        named = " | ".join(f"call_{i}" for i in range(len(functions)))
        rules = [f"calls: {code(self.start)} {calls} {code(self.end)}", f"call: {named}"]
        for i, function in enumerate(functions):
            before, after = map(code, self._written(function.name))
            rules.append(f"call_{i}: {before} {json_rule(function.schema)} {after}")
        return rules


class DeepSeekV3(DeepSeekV31):
    """The type of a tool stands before its name."""

    name = "deepseek_v3"
    aliases = ("deepseek_r1",)

    def _one(self, scan: Scan) -> Steps[Call]:
        yield from scan.name(self.separator)
        yield from scan.take(self.separator)
        name = yield from scan.name("\n")
        yield from scan.take("\n```json\n")
        arguments = yield from scan.json("{")
        yield from scan.space()
        yield from scan.take("```")
        return Call(self.marks.plain(name), self.marks.plain(arguments))

    def _written(self, name: str) -> tuple[str, str]:
        before = f"{self.begin_call}function{self.separator}{name}\n```json\n"
        return before, f"\n```{self.end_call}"
