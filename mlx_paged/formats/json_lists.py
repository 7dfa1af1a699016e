"""Calls in a JSON list after a mark, which another mark may close."""

from collections.abc import Sequence
from typing import Any, ClassVar

from mlx_paged.formats.events import Call
from mlx_paged.formats.format import Format
from mlx_paged.formats.grammar import Function, json_rule
from mlx_paged.formats.json_tools import call_of
from mlx_paged.formats.marks import Marks, is_token, quoted
from mlx_paged.formats.scan import Calls, Scan, Steps
from mlx_paged.formats.schemas import Tools


class JsonLists(Format):
    """A format whose wrapper holds a JSON list of objects, or one object.

    Attributes:
        tags: the marks before and after a list; the second is empty if the list ends itself.
    """

    tags: ClassVar[tuple[tuple[str, str], ...]]

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.pairs = [
            (marks.code(start), marks.code(end) if end else "") for start, end in self.tags
        ]
        self.openers = tuple(start for start, _ in self.pairs)

    def one(self, text: str) -> Call:
        """The call that a JSON object is."""
        return call_of(text)

    def head(self, name: str) -> str:
        """The grammar of an object up to the arguments, which end the object."""
        return quoted(f'{{"name": {quoted(name)}, "arguments": ')

    def call(self, scan: Scan, tools: Tools) -> Calls:
        start, end = next(pair for pair in self.pairs if scan.text.startswith(pair[0]))
        yield from scan.take(start)
        yield from scan.space()
        calls = list[Call]()
        if (yield from scan.maybe("[")):
            yield from self._items(scan, calls)
        else:
            calls.append((yield from self._one(scan)))
        if end:
            yield from scan.close(end)
        return calls

    def _items(self, scan: Scan, calls: list[Call]) -> Steps[None]:
        """Add the calls in a list, up to its end."""
        while True:
            yield from scan.space()
            calls.append((yield from self._one(scan)))
            scan.keep(calls)
            yield from scan.space()
            if (yield from scan.maybe("]")):
                return
            yield from scan.take(",")

    def _one(self, scan: Scan) -> Steps[Call]:
        value = yield from scan.json("{")
        return self.one(self.marks.plain(value))

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        known = (pair for pair in self.pairs if is_token(pair[0]))
        start, end = map(self.marks.lark, next(known, self.pairs[0]))
        more = '(", " object)*' if several else ""
        named = " | ".join(f"object_{i}" for i in range(len(functions)))
        rules = [f'calls: {start} "[" object {more} "]" {end}', f"object: {named}"]
        for i, function in enumerate(functions):
            rules.append(
                f'object_{i}: {self.head(function.name)} {json_rule(function.schema)} "}}"'
            )
        return rules
