"""Calls of Liquid's LFM2: Python, or JSON if the prompt asks for it, between tokens.

<|tool_call_start|>[f(x="1", n=2), g()]<|tool_call_end|>
<|tool_call_start|>[{"name": "f", "arguments": {"x": "1"}}]<|tool_call_end|>
"""

import re
from typing import Any

from mlx_paged.formats.json_tools import objects
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.pythonic import PythonLiterals
from mlx_paged.formats.scan import Calls, Scan
from mlx_paged.formats.schemas import Tools


class Lfm2(PythonLiterals):
    """A list of calls between tokens."""

    name = "lfm2"
    aliases = ("pythonic",)
    tokens = "<|tool_call_start|>", "<|tool_call_end|>"

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.begin_mark, self.end_mark = map(marks.code, self.tokens)
        self.openers = (self.begin_mark,)
        self.start = re.compile(rf"{re.escape(self.begin_mark)}\s*\[\s*")
        self.stop = re.compile(rf"\s*,?\s*\]\s*{re.escape(self.end_mark)}")

    def call(self, scan: Scan, tools: Tools) -> Calls:
        yield from scan.take(self.begin_mark)
        yield from scan.space()
        inner = scan.at
        yield from scan.maybe("[")
        yield from scan.space()
        if (yield from scan.maybe("{")):
            scan.at = inner
            calls = yield from objects(scan, self.marks, self.end_mark)
        else:
            scan.at = 0
            calls = yield from super().call(scan, tools)
        return calls

    def call_rules(self, several: bool) -> tuple[str, str, str, str]:
        start, end = self.marks.lark(self.begin_mark), self.marks.lark(self.end_mark)
        more = '(", " function)*' if several else ""
        return f'{start} "[" function {more} "]" {end}', "", '"("', '")"'
