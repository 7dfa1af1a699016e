"""Calls of OLMo 3: Python, each in a line of its own.

<function_calls>
f(x="1", n=2)
g()
</function_calls>
"""

import re
from typing import Any

from mlx_paged.formats.marks import Marks
from mlx_paged.formats.pythonic import PythonLiterals


class Olmo3(PythonLiterals):
    """Calls between tags."""

    name = "olmo3"
    tokens = "<function_calls>", "</function_calls>"
    between = re.compile(r"[ \t\r]*\n\s*")

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.begin_mark, self.end_mark = map(marks.code, self.tokens)
        self.openers = (self.begin_mark,)
        self.start = re.compile(rf"{re.escape(self.begin_mark)}\s*")
        self.stop = re.compile(rf"\s*{re.escape(self.end_mark)}")

    def call_rules(self, several: bool) -> tuple[str, str, str, str]:
        start, end = self.marks.lark(self.begin_mark), self.marks.lark(self.end_mark)
        more = '("\\n" function)*' if several else ""
        return f'{start} "\\n" function {more} "\\n" {end}', "", '"("', '")"'
