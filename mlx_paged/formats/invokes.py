"""Calls in XML with names in attributes: a wrapper, functions, and plain values."""

import re
from typing import Any, ClassVar

from mlx_paged.formats.grammar import Shape
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.tagged import Tagged


class Invokes(Tagged):
    """Several functions have one wrapper.

    Attributes:
        tags: the names of the tags of the wrapper, a function and a parameter.
        part: a mark that the names have in them.
    """

    tags: ClassVar[tuple[str, str, str]]
    part: ClassVar[str | None] = None

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        if self.part:
            marks.code(self.part)
        outer, function, parameter = map(marks.coded_text, self.tags)
        start, end = marks.code(f"<{outer}>"), marks.code(f"</{outer}>")
        self.function_end = marks.code(f"</{function}>")
        self.parameter_end = marks.code(f"</{parameter}>")
        self.wrapper = start, end
        self.openers = (start,)
        self.function = re.compile(rf'\s*<{function}\b[^>]*?\bname="(?P<name>[^"]+)"[^>]*>')
        self.parameter = re.compile(rf'<{parameter}\b[^>]*?\bname="(?P<key>[^"]+)"[^>]*>')
        self.shape = Shape(
            wrapper=(f"{start}\n", end),
            function=(f'<{function} name="', '">\n'),
            function_end=f"{self.function_end}\n",
            parameter=(f'<{parameter} name="', '">'),
            parameter_end=f"{self.parameter_end}\n",
            between="",
            is_shared=True,
        )
