"""XML of Qwen3-Coder, Qwen 3.5 and later; Nemotron 3 and others use it, too.

<tool_call>
<function=f>
<parameter=x>
value
</parameter>
</function>
</tool_call>
"""

import re
from typing import Any

from mlx_paged.formats.grammar import Shape
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.tagged import Tagged


class Qwen3Coder(Tagged):
    """A value stands in lines of its own."""

    name = "qwen3_coder"
    aliases = ("qwen3_xml",)

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.wrapper = marks.code("<tool_call>"), marks.code("</tool_call>")
        self.openers = (self.wrapper[0],)
        self.function = re.compile(r"\s*<function=(?P<name>[^<>]*)>")
        self.function_end = marks.code("</function>")
        self.parameter = re.compile(r"<parameter=(?P<key>[^<>\n]+)>")
        self.parameter_end = marks.code("</parameter>")
        self.shape = Shape(
            wrapper=(f"{self.wrapper[0]}\n", f"\n{self.wrapper[1]}"),
            function=("<function=", ">\n"),
            function_end=self.function_end,
            parameter=("<parameter=", ">\n"),
            parameter_end=f"\n{self.parameter_end}\n",
        )

    def trimmed(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n")
