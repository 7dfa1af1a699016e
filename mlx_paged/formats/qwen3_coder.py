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
from typing import Any, ClassVar

from mlx_paged.formats.grammar import Shape
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.tagged import Tagged


class Qwen3Coder(Tagged):
    """A value stands in lines of its own.

    Attributes:
        tags: around one or more functions.
        line: stands before and after a value.
    """

    name = "qwen3_coder"
    aliases = ("qwen3_xml",)
    tags: ClassVar[tuple[str, str]] = "<tool_call>", "</tool_call>"
    line: ClassVar[str] = "\n"

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        start, end = map(marks.code, self.tags)
        self.wrapper = start, end
        self.openers = (start,)
        self.function = re.compile(r"\s*<function=(?P<name>[^<>]*)>")
        self.function_end = marks.code("</function>")
        self.parameter = re.compile(r"<parameter=(?P<key>[^<>\n]+)>")
        self.parameter_end = marks.code("</parameter>")
        self.shape = Shape(
            wrapper=(f"{start}\n", f"\n{end}"),
            function=("<function=", ">\n"),
            function_end=self.function_end,
            parameter=("<parameter=", f">{self.line}"),
            parameter_end=f"{self.line}{self.parameter_end}\n",
        )

    def trimmed(self, text: str) -> str:
        return text.removeprefix(self.line).removesuffix(self.line)
