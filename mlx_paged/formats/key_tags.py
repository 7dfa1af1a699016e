"""Calls with tags around each key and each plain value; the name has no tags of its own."""

import re
from typing import Any, ClassVar

from mlx_paged.formats.grammar import Shape
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.tagged import Tagged


class KeyTags(Tagged):
    """Each wrapper holds one call.

    Attributes:
        prefix: what the names of the tags begin with.
    """

    prefix: ClassVar[str] = ""

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        names = [f"{self.prefix}{name}" for name in ("tool_call", "arg_key", "arg_value")]
        start, key, value = (marks.code(f"<{name}>") for name in names)
        end, key_end, value_end = (marks.code(f"</{name}>") for name in names)
        self.openers = (start,)
        self.wrapper = None
        self.function = re.compile(rf"{start}\s*(?P<name>[^\s<]+?)\s*(?={key}|{end})")
        self.function_end = end
        self.parameter = re.compile(rf"{key}(?P<key>[^<]+?){key_end}\s*{value}")
        self.parameter_end = value_end
        self.shape = Shape(
            wrapper=("", ""),
            function=(start, "\n"),
            function_end=end,
            parameter=(key, f"{key_end}\n{value}"),
            parameter_end=f"{value_end}\n",
        )
