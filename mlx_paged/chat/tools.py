"""Tools as chat templates read them."""

from collections.abc import Iterable
from typing import Any

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def completed(tools: Iterable[Any]) -> list[Any]:
    """Tools of which each function has `parameters` with `properties`, which templates read. What
    is no function in the form of OpenAI's chat completions stays."""
    return [_completed(tool) for tool in tools]


def _completed(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    schema = function.get("parameters") or NO_PARAMETERS
    if isinstance(schema, dict) and schema.get("properties") is None:
        schema = schema | {"properties": {}}
    return tool | {"function": function | {"parameters": schema}}
