"""What a chat template can do, which is tried when its model is loaded."""

from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.chat.rendering import rendered
from mlx_paged.protocol.turns import JOINED
from mlx_paged.vision.images import knows_only_parts

ASK = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hello."}

FUNCTION = {"name": "f", "arguments": {}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}],
}
BESIDE = "xq7w", "w7qx"  # texts around an image, which no template has


class Abilities(NamedTuple):
    """What prompts of a template can be asked for."""

    switch: str | None = None  # the argument of the template that turns thinking on and off
    takes_effort: bool = False  # whether it takes `reasoning_effort`
    tools_problem: str | None = "the model has no chat template"  # None: tools can be used
    only_parts: bool = False  # whether it loses a text that is not a part of a list
    joins: tuple[str, ...] = ()  # roles of which it takes no two turns in a row
    shows_results: bool = False  # whether it shows images in results of tools as those of users


def tried(tokenizer: TokenizerWrapper) -> Abilities:
    """What the template of `tokenizer` does with arguments and tools. Raises ValueError if it is
    no template."""
    if not tokenizer.has_chat_template:
        return Abilities()
    try:
        _render(tokenizer, ASK)
    except Exception as error:  # it may also refuse this chat
        if isinstance(error, TemplateSyntaxError):
            raise ValueError(f"chat template: line {error.lineno}: {error.message}") from error
    switches = ("enable_thinking", "thinking")
    return Abilities(
        next((name for name in switches if _reacts(tokenizer, name, True, False)), None),
        _reacts(tokenizer, "reasoning_effort", "low", "high"),
        only_parts=knows_only_parts(tokenizer),
        joins=tuple(role for role in JOINED if _takes_one(tokenizer, role)),
        shows_results=_shows_results(tokenizer),
    )


def _render(tokenizer: TokenizerWrapper, *turns: dict[str, Any], **options: Any) -> str:
    copies = [dict(turn) for turn in turns]
    return rendered(tokenizer, copies, **options)


def _takes_one(tokenizer: TokenizerWrapper, role: str) -> bool:
    """Whether prompts with two turns of a role in a row fail, and with one do not."""
    before, turn = ([], ASK) if role == "user" else ([ASK], ANSWER)
    after = [ASK] if before else []
    return _renders(tokenizer, *before, turn, *after) and not _renders(
        tokenizer, *before, turn, turn, *after
    )


def _shows_results(tokenizer: TokenizerWrapper) -> bool:
    """Whether the place of an image in a tool's result is that of an image in a user's turn."""
    texts = [{"type": "text", "text": text} for text in BESIDE]
    parts = [texts[0], {"type": "image"}, texts[1]]
    try:
        asked = _render(tokenizer, {"role": "user", "content": parts})
        result = {"role": "tool", "tool_call_id": "1", "content": parts}
        told = _render(tokenizer, ASK, CALL, result)
    except Exception:  # a template can raise anything
        return False
    first, last = BESIDE
    place = asked.partition(first)[2].partition(last)[0]
    return bool(place.strip()) and f"{first}{place}{last}" in told


def _renders(tokenizer: TokenizerWrapper, *turns: dict[str, Any]) -> bool:
    try:
        _render(tokenizer, *turns)
    except Exception:  # a template can raise anything
        return False
    return True


def _reacts(tokenizer: TokenizerWrapper, name: str, *values: Any) -> bool:
    """Whether prompts differ with the values of an argument."""
    options = {"add_generation_prompt": True}
    try:
        return len({_render(tokenizer, ASK, **options, **{name: x}) for x in values}) > 1
    except Exception:  # a template can raise anything
        return False
