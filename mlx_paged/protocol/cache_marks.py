"""Anthropic's `cache_control`: up to where the K/V of a prompt is worth more, and for how long."""

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_paged.chat.encoding import encoded
from mlx_paged.chat.marks import part
from mlx_paged.protocol.constraints import require
from mlx_paged.protocol.fields import Fields

TTLS = {"5m": 300.0, "1h": 3600.0}
"""Seconds by `ttl`."""

USUAL = "5m"
MOST = 4  # breakpoints of a request, as in Anthropic's API
TAIL = 64  # characters by which the end of a block is found in the text of the prompt

Breakpoint = tuple[str | None, float]
"""The last characters of a block, or None for the end of the prompt, and seconds."""


def breakpoints(body: Fields) -> list[Breakpoint]:
    """The last breakpoint of each time to live, in the order of the prompt: all before it is worth
    more. Raises ValueError, which names the field, for a `cache_control` that is none."""
    found, seconds_of = list[Breakpoint](), dict[float, Breakpoint]()
    for name, control, tail in _given(body):
        is_object = isinstance(control, dict) and control.get("type") == "ephemeral"
        require(is_object, name, 'an object with the type "ephemeral"', control)
        ttl = control.get("ttl")
        is_ttl = ttl is None or (isinstance(ttl, str) and ttl in TTLS)
        require(is_ttl, f"{name}.ttl", " or ".join(TTLS), ttl)
        found.append((tail, TTLS[ttl or USUAL]))
        require(len(found) <= MOST, name, f"at most {MOST} in a request", len(found))
    for each in found:
        if each[0] != "":  # no text tells where it is
            seconds_of[each[1]] = each
    return [each for each in found if seconds_of.get(each[1]) is each]


def places(
    tokenizer: Any, text: str, tokens: Sequence[int], given: Sequence[Breakpoint]
) -> tuple[tuple[int, float], ...]:
    """How many leading tokens of a prompt are before each breakpoint, and the seconds. A block is
    where its last characters are found last."""
    found = []
    for tail, seconds in given:
        at = len(text) if tail is None else text.rfind(tail)
        if at >= 0:
            rest = part(text, at + len(tail or ""))
            num_after = len(encoded(tokenizer, rest, add_special_tokens=False)) if rest else 0
            found.append((max(0, len(tokens) - num_after), seconds))
    return tuple(found)


def _given(body: Fields) -> Iterator[tuple[str, Any, str | None]]:
    """Each `cache_control`: its name, its value, and the end of the text that it is of."""
    messages = _objects(body.get("messages"))
    for i, tool in enumerate(_objects(body.get("tools"))):
        if tool.get("cache_control") is not None:
            yield f"tools[{i}].cache_control", tool["cache_control"], _end(tool.get("description"))
    for i, block in enumerate(_objects(body.get("system"))):
        if block.get("cache_control") is not None:
            yield f"system[{i}].cache_control", block["cache_control"], _end(block.get("text"))
    for i, message in enumerate(messages):
        blocks = _objects(message.get("content"))
        for j, block in enumerate(blocks):
            if block.get("cache_control") is None:
                continue
            is_last = message is messages[-1] and block is blocks[-1]
            name = f"messages[{i}].content[{j}].cache_control"
            yield name, block["cache_control"], None if is_last else _text_of(block)
    if body.get("cache_control") is not None:
        yield "cache_control", body["cache_control"], None


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; other things are refused elsewhere."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text_of(block: dict[str, Any]) -> str:
    """The end of the text of a block, or of the result of a tool."""
    content = block.get("content")
    if isinstance(content, list):
        content = next((each.get("text") for each in reversed(_objects(content))), "")
    return _end(block.get("text") or content)


def _end(text: Any) -> str:
    """The last characters of a text, without the spaces that a chat template may leave out."""
    return text.strip()[-TAIL:] if isinstance(text, str) else ""
