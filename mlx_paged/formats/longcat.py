"""LongCat's tags around JSON, or around keys and plain values.

<longcat_tool_call>
{"name": "f", "arguments": {"x": 1}}
</longcat_tool_call>

<longcat_tool_call>f
<longcat_arg_key>x</longcat_arg_key>
<longcat_arg_value>1</longcat_arg_value>
</longcat_tool_call>
"""

import re
from collections.abc import Sequence
from typing import Any

from mlx_paged.formats.grammar import Function
from mlx_paged.formats.json_tools import object_rules, objects
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.scan import Calls, Scan
from mlx_paged.formats.schemas import Tools
from mlx_paged.formats.tagged import Tagged


class Longcat(Tagged):
    """A wrapper holds one call."""

    name = "longcat"
    tokens = ("<longcat_tool_call>",)
    prefix = "longcat_"

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        names = ("tool_call", "arg_key", "arg_value")
        start, key, value = (marks.code(f"<{self.prefix}{name}>") for name in names)
        end, key_end, value_end = (marks.code(f"</{self.prefix}{name}>") for name in names)
        self.openers = (start,)
        self.wrapper = None
        self.function = re.compile(
            rf"{start}\s*(?P<name>[^\s<]+?)\s*(?={key}|{end})",
        )
        self.function_end = end
        self.parameter = re.compile(rf"{key}(?P<key>[^<]+?){key_end}\s*{value}")
        self.parameter_end = value_end

    def call(self, scan: Scan, tools: Tools) -> Calls:
        yield from scan.take(self.openers[0])
        yield from scan.space()
        if (yield from scan.maybe("{")):
            scan.at -= 1
            calls = yield from objects(scan, self.marks, self.function_end)
        else:
            scan.at = 0
            calls = yield from super().call(scan, tools)
        return calls

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        start, end = (self.marks.lark(mark) for mark in (self.openers[0], self.function_end))
        return object_rules(start, end, functions, several)
