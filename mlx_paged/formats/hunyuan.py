"""Calls of Tencent's Hunyuan A13B.

<tool_calls>[{"name": "f", "arguments": {"x": 1}}]</tool_calls>
"""

from mlx_paged.formats.json_lists import JsonLists


class Hunyuan(JsonLists):
    """Tags around a list of calls."""

    name = "hunyuan"
    aliases = ("hunyuan_a13b",)
    tags = (("<tool_calls>", "</tool_calls>"),)
