"""What a chat template can do, which is tried when its model is loaded."""

from os.path import commonprefix
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.outputs import describe
from mlx_paged.vision.images import knows_only_parts

ASK = {"role": "user", "content": "Hello"}
TOOL_NAME, ARGUMENTS = "read_weather", {"city": "Rome"}
FUNCTION = {"name": TOOL_NAME, "arguments": ARGUMENTS}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": FUNCTION}],
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": "Tells the weather.", "parameters": SCHEMA},
}


class Abilities(NamedTuple):
    """What prompts of a template can be asked for."""

    switch: str | None = None  # the argument of the template that turns thinking on and off
    takes_effort: bool = False  # whether it takes `reasoning_effort`
    tools_problem: str | None = "the model has no chat template"  # None: tools can be used
    only_parts: bool = False  # whether it loses a text that is not a part of a list


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
        _tools_problem(tokenizer),
        knows_only_parts(tokenizer),
    )


def _render(tokenizer: TokenizerWrapper, *turns: dict[str, Any], **options: Any) -> str:
    copies = [dict(turn) for turn in turns]
    return str(tokenizer.apply_chat_template(copies, tokenize=False, **options))


def _reacts(tokenizer: TokenizerWrapper, name: str, *values: Any) -> bool:
    """Whether prompts differ with the values of an argument."""
    options = {"add_generation_prompt": True}
    try:
        return len({_render(tokenizer, ASK, **options, **{name: x}) for x in values}) > 1
    except Exception:  # a template can raise anything
        return False


def _tools_problem(tokenizer: TokenizerWrapper) -> str | None:
    """Why tools cannot be used, if so: the template does not name them, or a call that it writes is
    not read as that call."""
    try:
        before = _render(tokenizer, ASK, tools=[TOOL])
        if TOOL_NAME not in before:
            return "the chat template of the model ignores tools"
        if not tokenizer.has_tool_calling:
            return "no parser is known of the model's tool calls"
        whole = _render(tokenizer, ASK, CALL, tools=[TOOL])
        written = whole[len(commonprefix((before, whole))) :]  # noqa: RUF071, of characters
        ends = [tokenizer.decode([token]) for token in tokenizer.eos_token_ids]
        state, read = make_text_state_machine(tokenizer).make_state(), list[str]()
        for end in filter(None, ends):
            written = written.partition(end)[0]
        state, parts = TextStateMachine.split(state, written)
        _, rest, last = TextStateMachine.flush(state)
        for name, text in [*parts, (last, rest)]:
            read += [text] if name == "tool" and text else []
        calls = tokenizer.tool_parser("".join(read), [TOOL])
        found = calls if isinstance(calls, list) else [calls]
        is_read = [{name: call.get(name) for name in FUNCTION} for call in found] == [FUNCTION]
    except Exception as error:  # a template and a parser can raise anything
        return f"a tool call of the chat template is not read: {describe(error)}"
    return None if is_read else f"a tool call of the chat template is read as {calls!s:.200}"
