"""Lists of actions of Cohere's Command R7B and Command A, and of Command R before them.

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}
]<|END_ACTION|>

Action: ```json
[{"tool_name": "f", "parameters": {"x": 1}}]
```
"""

from typing import Any

from mlx_paged.formats.events import Call
from mlx_paged.formats.json_lists import JsonLists
from mlx_paged.formats.json_text import members
from mlx_paged.formats.json_tools import object_of, text_of
from mlx_paged.formats.marks import Marks, is_token, quoted
from mlx_paged.formats.scan import checked_name

AROUND_CONTENT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


class Cohere(JsonLists):
    """The number of a call within a chat is no identity: templates number calls themselves. Tokens
    around the content are no text."""

    name = "cohere"
    aliases = ("cohere_command",)
    tokens = "<|START_ACTION|>", "<|END_ACTION|>"
    tags = (("<|START_ACTION|>", "<|END_ACTION|>"), ("Action: ```json\n", "```"))

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.silent = tuple(filter(is_token, map(marks.code, AROUND_CONTENT)))

    def one(self, text: str) -> Call:
        parts = dict(members(text))
        name = text_of(parts.get("tool_name", ""))
        return Call(checked_name(name), object_of(parts.get("parameters", "{}")))

    def head(self, name: str) -> str:
        number = '"{\\"tool_call_id\\": \\"" /[0-9]{1,3}/'
        rest = f'", "tool_name": {quoted(name)}, "parameters": '
        return f"{number} {quoted(rest)}"
