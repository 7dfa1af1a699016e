"""What a chat template can do, which is tried when its model is loaded."""

from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.chat.rendering import rendered
from mlx_paged.server.images import joined
from mlx_paged.vision.images import knows_only_parts

ASK = {"role": "user", "content": "Hello"}


class Abilities(NamedTuple):
    """What prompts of a template can be asked for."""

    switch: str | None = None  # the argument of the template that turns thinking on and off
    takes_effort: bool = False  # whether it takes `reasoning_effort`
    tools_problem: str | None = "the model has no chat template"  # None: tools can be used
    only_parts: bool = False  # whether it loses a text that is not a part of a list
    joins_turns: bool = False  # whether it refuses two turns of one role, which are joined then


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
        joins_turns=_refuses(tokenizer, ASK, ASK) and not _refuses(tokenizer, ASK),
    )


def joined_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat without two turns of a user, or of the assistant, in a row."""
    found = list[dict[str, Any]]()
    for message in messages:
        is_same = bool(found) and found[-1]["role"] == message["role"]
        if is_same and message["role"] in ("user", "assistant"):
            found[-1] = _one_turn(found[-1], message)
        else:
            found.append(message)
    return found


def _one_turn(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two turns as one, with the contents and the calls of both."""
    contents = [turn["content"] for turn in (first, second) if turn.get("content")]
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    content = joined(*contents) if len(contents) == 2 else next(iter(contents), "")
    turn = first | second | {"content": content}
    return turn | ({"tool_calls": calls} if calls else {})


def _render(tokenizer: TokenizerWrapper, *turns: dict[str, Any], **options: Any) -> str:
    copies = [dict(turn) for turn in turns]
    return rendered(tokenizer, copies, **options)


def _refuses(tokenizer: TokenizerWrapper, *turns: dict[str, Any]) -> bool:
    """Whether the template raises for these turns."""
    try:
        _render(tokenizer, *turns)
    except Exception:  # a template can raise anything
        return True
    return False


def _reacts(tokenizer: TokenizerWrapper, name: str, *values: Any) -> bool:
    """Whether prompts differ with the values of an argument."""
    options = {"add_generation_prompt": True}
    try:
        return len({_render(tokenizer, ASK, **options, **{name: x}) for x in values}) > 1
    except Exception:  # a template can raise anything
        return False
