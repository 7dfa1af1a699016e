"""Formats of which only a function of mlx-lm is known: it gets the text between the marks."""

import json
from collections.abc import Callable
from typing import Any

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.format import Format
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.scan import Calls, Scan, checked_name
from mlx_paged.formats.schemas import Tools
from mlx_paged.formats.thoughts import Thoughts


class Foreign(Format):
    """A format that `parse` reads.

    Args:
        name: what mlx-lm calls it.
        parse: gets the text of a wrapper and the tools; returns a dictionary with ``name`` and
            ``arguments``, or a list of them, or raises anything.
        start: the mark before a wrapper.
        end: the mark after it; empty if only the end of the answer ends it.
    """

    def __init__(
        self,
        marks: Marks,
        thoughts: Thoughts | None,
        name: str,
        parse: Callable[..., Any],
        start: str,
        end: str,
    ) -> None:
        super().__init__(marks, thoughts)
        self.name, self._parse = name, parse
        self.start, self.end = marks.code(start), marks.code(end) if end else ""
        self.openers = (self.start,)

    def call(self, scan: Scan, tools: Tools) -> Calls:
        yield from scan.take(self.start)
        start = looked = scan.at
        while not self.end or (found := scan.text.find(self.end, looked)) < 0:
            looked = max(start, len(scan.text) - len(self.end) + 1)
            if scan.is_ended and self.end and scan.is_cut:
                raise NoCall
            if scan.is_ended:
                found = len(scan.text)
                break
            yield
        scan.at = min(found + len(self.end), len(scan.text))
        return self._calls(self.marks.plain(scan.text[start:found]), tools)

    def _calls(self, text: str, tools: Tools) -> list[Call]:
        try:
            calls = self._parse(text, tools.given)
            each = calls if isinstance(calls, list) else [calls]
            found = [
                Call(
                    checked_name(call["name"]),
                    json.dumps(call["arguments"], ensure_ascii=False, allow_nan=False),
                    call.get("id"),
                )
                for call in each
            ]
        except Exception as error:  # a parser can raise anything
            raise NoCall from error
        if not found:
            raise NoCall
        return found
