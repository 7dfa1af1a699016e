"""DeepSeek V3.2's DSML: XML whose tags have a mark in them and tell texts from other values.

<｜DSML｜function_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="x" string="true">value</｜DSML｜parameter>
<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

import re
from typing import Any

from mlx_paged.formats.invokes import Invokes
from mlx_paged.formats.json_text import is_json, written
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.schemas import Tools

_IS_TEXT = re.compile(r'\sstring="(true|false)"')


class DeepSeekV32(Invokes):
    """A value is the text that its tag says it is; the schema decides where the tag does not."""

    name = "deepseek_v32"
    tokens = ("｜DSML｜",)
    tags = "｜DSML｜function_calls", "｜DSML｜invoke", "｜DSML｜parameter"
    part = "｜DSML｜"

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        assert self.shape is not None
        head, end = self.shape.parameter[0], self.shape.parameter_end
        self.shape = self.shape._replace(
            parameter=(head, '" string="false">'), text=('" string="true">', end), is_told=True
        )

    def value(self, tools: Tools, name: str, opened: re.Match[str], text: str) -> str:
        told, plain = _IS_TEXT.search(opened[0]), self.marks.plain(text)
        if told and told[1] == "true":
            return written(plain)
        if told and is_json(plain):
            return plain.strip()
        return super().value(tools, name, opened, text)


class DeepSeekV4(DeepSeekV32):
    """The wrapper has another name."""

    name = "deepseek_v4"
    tags = "｜DSML｜tool_calls", "｜DSML｜invoke", "｜DSML｜parameter"
