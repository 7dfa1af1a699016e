"""LongCat's tags around JSON, or around keys and plain values.

<longcat_tool_call>
{"name": "f", "arguments": {"x": 1}}
</longcat_tool_call>

<longcat_tool_call>f
<longcat_arg_key>x</longcat_arg_key>
<longcat_arg_value>1</longcat_arg_value>
</longcat_tool_call>
"""

from collections.abc import Sequence

from mlx_paged.formats.grammar import Function
from mlx_paged.formats.json_tools import object_rules, objects
from mlx_paged.formats.key_tags import KeyTags
from mlx_paged.formats.scan import Calls, Scan
from mlx_paged.formats.schemas import Tools


class Longcat(KeyTags):
    """A wrapper holds one call."""

    name = "longcat"
    tokens = ("<longcat_tool_call>",)
    prefix = "longcat_"

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
