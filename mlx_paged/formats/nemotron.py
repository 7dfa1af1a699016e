"""Nemotron Nano 2 and Llama-Nemotron: one list of JSON objects. Nemotron 3 has Qwen3-Coder's XML.

<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>
"""

from collections.abc import Sequence

from mlx_paged.formats.grammar import Function
from mlx_paged.formats.json_tools import JsonTools, json_objects


class Nemotron(JsonTools):
    """All calls of a turn have one wrapper."""

    name = "nemotron"
    aliases = ("nemotron_json",)
    tokens = "<TOOLCALL>", "</TOOLCALL>"
    tags = "<TOOLCALL>", "</TOOLCALL>"

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        start, end = self.marks.lark(self.start), self.marks.lark(self.end)
        more = '(", " object)*' if several else ""
        return [f'calls: {start} "[" object {more} "]" {end}', *json_objects(functions)]
