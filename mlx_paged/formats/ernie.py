"""ERNIE 4.5 Thinking: JSON between tags, and marks around the content.

<think>
A thought.
</think>

<response>
The answer.
</response>

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
"""

from typing import Any

from mlx_paged.formats.json_tools import JsonTools
from mlx_paged.formats.marks import Marks, is_token


class Ernie(JsonTools):
    """The marks of the content are no text where they are tokens of the model."""

    name = "ernie45"
    aliases = ("ernie", "ernie_x1")
    tokens = "<response>", "</response>", "<tool_call>"

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        start, end = map(marks.code, ("<response>", "</response>"))
        before, after = ("", "\n"), ("", "\n", "\n\n")
        around = [start + x for x in before] + [x + end + y for x in before for y in after]
        self.silent = tuple(filter(is_token, around))
