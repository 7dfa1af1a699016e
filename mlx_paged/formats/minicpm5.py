"""MiniCPM5's XML: functions without a wrapper; texts with marks or lines are CDATA sections.

<function name="f"><param name="n">1</param><param name="x"><![CDATA[a < b]]></param></function>
"""

import re
from typing import Any

from mlx_paged.formats.grammar import Shape
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.tagged import Tagged


class MiniCpm5(Tagged):
    """Each function is a call of its own."""

    name = "minicpm5"
    tokens = "<function", "</function>", "<param", "</param>"

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        function, self.function_end, parameter, end = map(marks.code, self.tokens)
        self.wrapper = None
        self.openers = (f"{function} name=",)
        self._section, section_end = map(marks.code, ("<![CDATA[", "]]>"))
        name = r"\s+name=(?P<quote>[\"'])(?P<{}>[^\"'<>]+)(?P=quote)\s*>"
        self.function = re.compile(function + name.format("name"))
        section = rf"(?:\s*(?P<section>{re.escape(self._section)}))?"
        self.parameter = re.compile(parameter + name.format("key") + section)
        self.parameter_end = end
        self._section_end = f"{section_end}{end}"
        self.shape = Shape(
            wrapper=("", ""),
            function=(f'{function} name="', '">'),
            function_end=self.function_end,
            parameter=(f'{parameter} name="', '">'),
            parameter_end=end,
            between="",
            text=(f'">{self._section}', self._section_end),
        )

    def end_of_value(self, opened: re.Match[str]) -> str:
        return self._section_end if opened["section"] else self.parameter_end
