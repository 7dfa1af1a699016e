"""Where the next prompts of a chat are likely to depart from its prompt."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.chat.encoding import encoded
from mlx_paged.chat.marks import part

Render = Callable[[list[dict[str, Any]]], str]

QUESTION = {"role": "user", "content": "·"}
ANSWER = {"role": "assistant", "content": "·"}
CONTEXT = 64
"""Characters on each side of a difference that decide how the text there is cut into tokens."""


def turn_ends(
    tokenizer: TokenizerWrapper,
    render: Render,  # the text of a chat, without the beginning of an answer
    messages: list[dict[str, Any]],
    text: str,  # of the prompt
    tokens: Sequence[int],
) -> tuple[int, ...]:
    """How many of the prompt's tokens it has in common with the next turn, whose template may leave
    out what was thought, and with another newest question."""
    if messages[-1]["role"] == "user":
        chats = [[*messages[:-1], QUESTION], [*messages, ANSWER, QUESTION]]
    else:
        chats = [[*messages, ANSWER]]
    found = set[int]()
    for chat in chats:
        with suppress(Exception):  # a template can raise anything
            found.add(_common_tokens(tokenizer, text, tokens, render(chat)))
    return tuple(sorted(found))


def _common_tokens(
    tokenizer: TokenizerWrapper, text: str, tokens: Sequence[int], other: str
) -> int:
    """How many leading tokens another text has in common with `text`. ValueError if a part of
    `text` is cut into other tokens than the whole."""
    same = _common(text, other)
    start = max(0, same - CONTEXT)
    ours, theirs = (
        encoded(tokenizer, piece, add_special_tokens=False)
        for piece in (part(text, start), part(other, start, same + CONTEXT))
    )
    rest = ours[_common(ours, theirs) :]
    position = len(tokens) - len(rest)
    if list(tokens[position:]) != rest:
        raise ValueError("these tokens are not the last ones")
    return position


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading items two texts or lists have in common."""
    least, most = 0, min(len(a), len(b))
    while least < most:
        middle = (least + most + 1) // 2
        if a[least:middle] == b[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
