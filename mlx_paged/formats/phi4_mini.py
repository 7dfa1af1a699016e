"""Calls of Phi-4-mini.

<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<|/tool_call|>
functools[{"name": "f", "arguments": {"x": 1}}]
"""

from mlx_paged.formats.json_lists import JsonLists


class Phi4Mini(JsonLists):
    """Tokens around a list, or a word before it."""

    name = "phi4_mini"
    aliases = ("phi4_mini_json",)
    tokens = "<|tool_call|>", "<|/tool_call|>"
    tags = (("<|tool_call|>", "<|/tool_call|>"), ("functools", ""))
