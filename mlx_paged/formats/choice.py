"""Chooses the format of a model, and tries it on a call that the chat template writes."""

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import product
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

from mlx_paged.chat.rendering import rendered
from mlx_paged.formats import thoughts
from mlx_paged.formats.events import Call, Event
from mlx_paged.formats.foreign import Foreign
from mlx_paged.formats.format import Format
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.registry import FORMATS, named
from mlx_paged.outputs import describe

LOGGER = logging.getLogger(__name__)

ASK = {"role": "user", "content": "Hello"}
ASKS = [(ASK,), ({"role": "system", "content": ""}, ASK)]
"""Chats with tools: some chat templates write tools only into the turn of the system."""
TOOL_NAME, ARGUMENTS = "read_weather", {"city": "Rome"}
FUNCTION = {"name": TOOL_NAME, "arguments": ARGUMENTS}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": "Tells the weather.", "parameters": SCHEMA},
}


class Choice(NamedTuple):
    """The format of a model."""

    format: Format
    problem: str | None  # why tools cannot be used, if so


def chosen(
    tokenizer: Any, tool_format: str | None = None, reasoning_format: str | None = None
) -> Choice:
    """The format of a model: `tool_format`, or what its tokenizer's configuration names, or what
    its chat template writes, or what mlx-lm takes it for.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        reasoning_format: the name of the marks of thoughts, see :data:`thoughts.STYLES`.

    Raises:
        ValueError: a name is not known.
    """
    vocab, template = tokenizer.get_vocab(), _template_of(tokenizer)
    marks = Marks(vocab)
    style = thoughts.chosen(vocab, template, reasoning_format)
    if tool_format is not None and named(tool_format) is None:
        known = ", ".join(form.name for form in FORMATS)
        raise ValueError(f"--tool-format: expected one of {known}, got {tool_format!r}")
    name = tool_format or _declared(tokenizer)
    first: Choice | None = None
    for ask, arguments in product(ASKS, (ARGUMENTS, json.dumps(ARGUMENTS))):
        found = _choice(tokenizer, name, marks, style, _written(tokenizer, ask, arguments))
        if found.problem is None:
            found.format.arguments_are_text = isinstance(arguments, str)
            found.format.tools_need_system = len(ask) > 1
            return found
        first = first or found
    assert first is not None
    return first


def _choice(
    tokenizer: Any,
    name: str | None,
    marks: Marks,
    style: thoughts.Thoughts | None,
    written: tuple[str | None, str | None],
) -> Choice:
    """The format of a name, or of a call that is `written` by the chat template, or not."""
    call, problem = written
    vocab = tokenizer.get_vocab()
    form = named(name) if name is not None else None
    if form is None and name is None:
        form = _that_reads(call, marks, style, vocab) or _by_vocabulary(vocab)
    own_name = (getattr(tokenizer.tool_parser, "__module__", None) or "").rpartition(".")[2]
    form = form or named(own_name)
    if form is not None:
        made = form(marks, style)
    elif tokenizer.tool_parser is not None and tokenizer.tool_call_start:
        LOGGER.warning("tool calls of the format %s are read by mlx-lm's parser", own_name)
        made = Foreign(
            marks,
            style,
            own_name,
            tokenizer.tool_parser,
            tokenizer.tool_call_start,
            tokenizer.tool_call_end or "",
        )
    else:
        made = Format(marks, style)
        problem = problem or "no parser is known of the model's tool calls"
    return Choice(made, problem or problem_of(made, call or ""))


def problem_of(form: Format, written: str) -> str | None:
    """Why tools cannot be used: the call that a chat template writes is not read as that call."""
    try:
        events = events_of(form, written)
    except Exception as error:  # a parser of mlx-lm can raise anything
        return f"a tool call of the chat template is not read: {describe(error)}"
    calls = [event for event in events if isinstance(event, Call)]
    if not calls:
        return "a tool call of the chat template is not read"
    found = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
    if found == [FUNCTION]:
        return None
    shown = found[0] if len(found) == 1 else found
    return f"a tool call of the chat template is read as {shown!s:.200}"


def events_of(form: Format, text: str, tools: Sequence[Any] = (TOOL,)) -> list[Event]:
    """What a format finds in a text that a chat template has written."""
    parser = form.parser(tools, Begin.START)
    return parser.feed(None, form.marks.coded_text(text)) + parser.finish(False)


def _that_reads(
    call: str | None, marks: Marks, style: thoughts.Thoughts | None, vocab: Mapping[str, int]
) -> type[Format] | None:
    """The format that reads a call; first one whose marks are tokens of the model."""
    if call is None:
        return None
    forms = sorted(FORMATS, key=lambda form: not _has_tokens(form, vocab))
    return next((form for form in forms if problem_of(form(marks, style), call) is None), None)


def _by_vocabulary(vocab: Mapping[str, int]) -> type[Format] | None:
    """The first format whose marks are tokens of the model."""
    return next((form for form in FORMATS if _has_tokens(form, vocab)), None)


def _has_tokens(form: type[Format], vocab: Mapping[str, int]) -> bool:
    return bool(form.tokens) and all(mark in vocab for mark in form.tokens)


def _written(
    tokenizer: Any, ask: Sequence[dict[str, Any]], arguments: object
) -> tuple[str | None, str | None]:
    """How the chat template writes a call with these arguments after the turns `ask`; or None, and
    why it writes none."""
    function = {"name": TOOL_NAME, "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    if not tokenizer.has_chat_template:
        return None, "the model has no chat template"
    try:
        before = _render(tokenizer, *ask)
        if TOOL_NAME not in before:
            return None, "the chat template of the model ignores tools"
        whole = _render(tokenizer, *ask, said)
    except Exception as error:  # a template can raise anything
        return None, f"a tool call of the chat template is not read: {describe(error)}"
    written = whole[len(commonprefix((before, whole))) :]  # noqa: RUF071, of characters
    for end in filter(None, (tokenizer.decode([token]) for token in tokenizer.eos_token_ids)):
        written = written.partition(end)[0]
    return written, None


def _render(tokenizer: Any, *turns: dict[str, Any]) -> str:
    copies = [dict(turn) for turn in turns]
    return rendered(tokenizer, copies, tools=[TOOL])


def _declared(tokenizer: Any) -> str | None:
    """What the tokenizer's configuration calls its format of tool calls."""
    try:
        path = Path(tokenizer.name_or_path) / "tokenizer_config.json"
        name = json.loads(path.read_text()).get("tool_parser_type")
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return name if isinstance(name, str) else None


def _template_of(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    return template if isinstance(template, str) else None
