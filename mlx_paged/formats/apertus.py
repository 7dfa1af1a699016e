"""Calls of Apertus: the name of a function is the only key of an object.

<|tools_prefix|>[{"f": {"x": 1}}, {"g": {}}]<|tools_suffix|>
"""

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.json_lists import JsonLists
from mlx_paged.formats.json_text import members
from mlx_paged.formats.json_tools import object_of
from mlx_paged.formats.marks import quoted
from mlx_paged.formats.scan import checked_name


class Apertus(JsonLists):
    """Tokens around a list of calls."""

    name = "apertus"
    tokens = "<|tools_prefix|>", "<|tools_suffix|>"
    tags = (("<|tools_prefix|>", "<|tools_suffix|>"),)

    def one(self, text: str) -> Call:
        parts = members(text)
        if len(parts) != 1:
            raise NoCall
        name, arguments = parts[0]
        return Call(checked_name(name), object_of(arguments))

    def head(self, name: str) -> str:
        return quoted(f"{{{quoted(name)}: ")
