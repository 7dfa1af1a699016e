"""Changes a chat where the chat template would fail. Imports no mlx."""

from collections.abc import Collection, Sequence

from mlx_paged.protocol.fields import Fields
from mlx_paged.protocol.images import joined

JOINED = ("user", "assistant")
"""Roles whose turns in a row may become one."""


def merged(messages: Sequence[Fields], roles: Collection[str]) -> list[Fields]:
    """A chat in which turns in a row of one of these roles are one turn: an empty line is between
    their texts, and their calls are in one list."""
    found = list[Fields]()
    for message in messages:
        role = message["role"]
        if found and role in roles and found[-1]["role"] == role:
            found[-1] = _one(found[-1], message)
        else:
            found.append(message)
    return found


def _one(first: Fields, second: Fields) -> Fields:
    whole = first | second
    for name in ("content", "reasoning_content", "reasoning"):
        given = [turn[name] for turn in (first, second) if turn.get(name)]
        if given:
            whole[name] = joined(*given) if len(given) > 1 else given[0]
    calls = [call for turn in (first, second) for call in turn.get("tool_calls") or ()]
    return whole | ({"tool_calls": calls} if calls else {})
