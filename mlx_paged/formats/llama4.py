"""Calls of Llama 4: a list of Python or JSON objects, which tokens may stand around.

[f(x="1", n=2), g()]
<|python_start|>[f(x="1", n=2), g()]<|python_end|>
<|python_start|>{"name": "f", "parameters": {"x": "1"}}<|python_end|>
"""

import re
from typing import Any, ClassVar

from mlx_paged.formats.llama3 import Llama3
from mlx_paged.formats.marks import Marks, is_token
from mlx_paged.formats.pythonic import Pythonic
from mlx_paged.formats.scan import Calls, Scan
from mlx_paged.formats.schemas import Tools


class Llama4(Pythonic):
    """The tokens around calls are no text."""

    name = "llama4"
    aliases = ("llama4_pythonic", "llama4_json")
    tokens: ClassVar[tuple[str, ...]] = "<|python_start|>", "<|python_end|>"
    first_openers: tuple[str, ...] = ("[", "{")

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.silent = tuple(filter(is_token, map(marks.code, self.tokens)))
        end = self.silent[-1] if self.silent else "(?!)"
        self.stop = re.compile(rf"\s*,?\s*\](?:\s*{end})?")
        self._objects = Llama3(marks, None)

    def call(self, scan: Scan, tools: Tools) -> Calls:
        if scan.text.startswith("{"):
            calls = yield from self._objects.call(scan, tools)
        else:
            calls = yield from super().call(scan, tools)
        return calls
