"""Changes a chat where the chat template would fail. Imports no mlx."""

from collections.abc import Collection, Sequence
from itertools import groupby
from operator import itemgetter

from mlx_paged.protocol.fields import Fields
from mlx_paged.protocol.images import joined

JOINED = ("user", "assistant")
"""Roles whose turns in a row may become one."""


def merged(messages: Sequence[Fields], roles: Collection[str]) -> list[Fields]:
    """A chat in which turns in a row of one of these roles are one turn: an empty line is between
    their texts, and their calls are in one list."""
    found = list[Fields]()
    for role, group in groupby(messages, itemgetter("role")):
        turns = list(group)
        found += [_one(turns)] if role in roles else turns
    return found


def _one(turns: Sequence[Fields]) -> Fields:
    whole: Fields = {}
    for turn in turns:
        whole |= turn
    for name in ("content", "reasoning_content", "reasoning"):
        given = [turn[name] for turn in turns if turn.get(name)]
        if given:
            whole[name] = joined(given)
    calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
    return whole | ({"tool_calls": calls} if calls else {})


def num_turns(messages: Sequence[Fields]) -> int:
    """Messages and calls of a chat: a template writes a token or more for each."""
    return sum(1 + len(message.get("tool_calls") or ()) for message in messages)
