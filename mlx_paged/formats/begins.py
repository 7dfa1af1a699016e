"""Where the answer to a chat begins: in a thought, in its content, or before both."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from mlx_paged.formats.format import Format
from mlx_paged.formats.parser import Begin


def begin_of(
    form: Format,
    messages: Sequence[Mapping[str, Any]],
    prompt: str,
    rendered_alone: Callable[[], str],
    *,
    adds_prompt: bool,
    continues: bool,
) -> Begin:
    """Where an answer begins. What the template writes behind the messages decides, or the turn
    that the answer continues. Text of other messages does not.

    Args:
        prompt: the text of the chat as the chat template writes it.
        rendered_alone: returns the text of the chat without a generation prompt.
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
        before = rendered_alone()
        added = prompt[len(commonprefix((before, prompt))) :]  # noqa: RUF071, of characters
        return form.begin(added, None)
    return Begin.START
