"""Calls of IBM's Granite 3 and Granite 20B. Granite 4 writes JSON between tags.

<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]
<function_call> {"name": "f", "arguments": {"x": 1}}
"""

from mlx_paged.formats.json_lists import JsonLists


class Granite(JsonLists):
    """A call has no mark at its end: its JSON ends it."""

    name = "granite"
    aliases = ("granite_20b_fc",)
    tags = (("<|tool_call|>", ""), ("<function_call>", ""))
