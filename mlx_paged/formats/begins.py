"""Where the answer to a chat begins: in a thought, in its content, or before both."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from mlx_paged.formats.format import Format
from mlx_paged.formats.parser import Begin

LAST = "content-of-the-last-message"


def begin_of(
    form: Format,
    messages: Sequence[Mapping[str, Any]],
    prompt: str,
    rendered_alone: Callable[[Sequence[Mapping[str, Any]]], str],
    *,
    adds_prompt: bool,
    continues: bool,
) -> Begin:
    """Where an answer begins. What the template writes after the messages decides, or the turn
    that the answer continues. Text of other messages does not.

    Args:
        prompt: the text of the chat as the chat template writes it.
        rendered_alone: returns the text of messages without a generation prompt.
        adds_prompt: the template has added a generation prompt.
        continues: the answer continues the last message.
    """
    if continues:
        content = messages[-1].get("content")
        parts = content if isinstance(content, list) else [{"text": content or ""}]
        return form.begin("", "".join(str(part.get("text", "")) for part in parts))
    if not adds_prompt:
        return form.begin("", None)
    with suppress(Exception):  # a template can raise anything
        before = rendered_alone(messages)
        added = prompt[len(commonprefix((before, prompt))) :]  # noqa: RUF071, of characters
        return form.begin(added or _after_the_last(messages, rendered_alone), None)
    return Begin.START


def _after_the_last(
    messages: Sequence[Mapping[str, Any]],
    rendered_alone: Callable[[Sequence[Mapping[str, Any]]], str],
) -> str:
    """What the template writes after the content of the last message. Some templates write the
    generation prompt there, whether they are asked for one or not."""
    last = {**messages[-1], "content": LAST}
    _, is_there, after = rendered_alone([*messages[:-1], last]).rpartition(LAST)
    return after if is_there else ""
