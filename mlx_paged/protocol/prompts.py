"""Turns a request into token ids as mlx-lm's server does. Any thread may call these functions."""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.server import convert_chat, process_message_content

from mlx_paged.chat.encoding import encoded
from mlx_paged.chat.marks import all_plain
from mlx_paged.chat.rendering import rendered
from mlx_paged.formats.begins import begin_of
from mlx_paged.formats.parser import Begin
from mlx_paged.prompt import Prompt as PromptOfImages
from mlx_paged.protocol import cache_marks, constraints, images, thinking
from mlx_paged.protocol.constraints import require
from mlx_paged.protocol.fields import AS_MANY_AS_FIT, RETENTIONS, SAMPLING, Fields
from mlx_paged.protocol.long_work import may_take_long
from mlx_paged.protocol.model_traits import ModelTraits
from mlx_paged.protocol.request_body import ContextExceeded
from mlx_paged.protocol.turn_ends import turn_ends
from mlx_paged.protocol.turns import merged, num_turns
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.vision.images import has_image, in_parts

LONG = 1 << 18  # bytes of a text; the tokens of a shorter one may all be held
SPARSE = 8  # bytes of a token: few texts that fit have more
PIECE = 1 << 16  # characters of a long text that are encoded at once


class Prompt(NamedTuple):
    """The token ids of a prompt."""

    tokens: Sequence[int]  # with its images, if the prompt has some
    text: str  # of the prompt, for requests with `echo`; else empty
    begin: Begin = Begin.START  # of the answer
    turn_ends: tuple[int, ...] = ()  # where later prompts may depart from it
    # Numbers of leading tokens, and for how many seconds their K/V is worth more.
    marks: tuple[tuple[int, float], ...] = ()

    @property
    def held_bytes(self) -> int:
        """Bytes of its images, which the request holds."""
        return self.tokens.nbytes if isinstance(self.tokens, PromptOfImages) else 0


def encode(model: ModelTraits, fields: Fields, template_args: dict[str, Any]) -> list[Prompt]:
    """The prompts of a request; `template_args` are defaults for the chat template. Raises
    ValueError if no prompt can be made of the request, ContextExceeded if it is too long."""
    tokenizer = model.tokenizer
    # A grammar makes the model call a tool that must be called, whatever its template does.
    may_call = fields.get("tools") and fields["tool_choice"] == "auto"
    if may_call and model.abilities.tools_problem:
        raise ValueError(f"tools: expected no tools: {model.abilities.tools_problem}")
    for prompt in fields.get("prompt", ()):  # before a tokenizer decodes them
        if isinstance(prompt, list) and prompt:
            model.token_ids.check_prompt("completions", prompt)
    try:
        if "messages" not in fields:
            return [_of_text(model, prompt, fields) for prompt in fields["prompt"]]
        text, fields, chat_args, given = _chat(model, fields, template_args)
        if not tokenizer.has_chat_template:
            return [Prompt(_tokens(model, text, fields), "")]
        ends: tuple[int, ...] = ()
        if given and model.image_processor is not None:
            _tokens(model, text, fields, add_special_tokens=False)  # an image has one or more
            tokens: Sequence[int] = model.image_processor(text, given)
            _check_room(model, fields, len(tokens))
        else:
            processor = model.image_processor
            adds_special = processor is not None and processor.adds_special
            tokens = plain = _tokens(model, text, fields, add_special_tokens=adds_special)
            if model.has_states and not fields["continue_final_message"]:
                render = partial(_render, model, fields["tools"], chat_args)
                with may_take_long():
                    ends = turn_ends(tokenizer, render, fields["messages"], text, plain)
        given_marks = fields.get("breakpoints", ())
        with may_take_long():
            marked = cache_marks.places(tokenizer, text, tokens, given_marks)
        return [Prompt(tokens, "", _begin(model, fields, chat_args, text), ends, marked)]
    except ContextExceeded:
        raise
    except Exception as error:  # a chat template can raise anything
        raise ValueError(f"no prompt can be made of the request: {error}") from error


def marks(prompt: Prompt, fields: Fields) -> list[tuple[int, float]]:
    """For how long the K/V of how many leading tokens is worth more."""
    retention = fields["prompt_cache_retention"]
    whole = [] if retention is None else [(len(prompt.tokens), RETENTIONS[retention])]
    return [*prompt.marks, *whole]


def text_of_chat(model: ModelTraits, fields: Fields, template_args: dict[str, Any]) -> str:
    """The text that the chat template makes of the messages of a request; the arguments and errors
    are those of :func:`encode`."""
    try:
        return str(_chat(model, fields, template_args)[0])
    except ContextExceeded:
        raise
    except Exception as error:
        raise ValueError(f"no prompt can be made of the request: {error}") from error


def tokens_of(model: ModelTraits, text: str, is_added: bool) -> list[int]:
    """The token ids of a text of any number of tokens, if its bytes can fit into the context.

    Args:
        is_added: whether the tokenizer adds the special tokens that it has for a beginning and end.
    """
    limit = model.max_context * model.longest_token
    expected = f"at most {limit} bytes, which may fit into the context"
    require(len(text.encode()) <= limit, "prompt", expected, len(text.encode()))
    with may_take_long():
        least = _least(model, text)
        expected = f"a text that may fit into the context, {model.max_context} tokens"
        require(least <= model.max_context, "prompt", expected, f"{least} tokens or more")
        return encoded(model.tokenizer, text, add_special_tokens=is_added)


def _chat(
    model: ModelTraits, fields: Fields, template_args: dict[str, Any]
) -> tuple[str, Fields, dict[str, Any], list[Any]]:
    """The text of a chat, the fields with the messages that it shows, the arguments of the chat
    template, and the images."""
    tokenizer = model.tokenizer
    if not (model.image_processor and model.abilities.shows_results):
        fields = fields | {"messages": images.told(fields["messages"])}
    given = images.taken(fields["messages"])
    sees = model.image_processor and tokenizer.has_chat_template
    require(not given or sees, "messages", "text only: this model sees no images", "one")
    if not tokenizer.has_chat_template:
        name, is_free = "continue_final_message", not fields["continue_final_message"]
        require(is_free, name, "nothing, for the model has no chat template", True)
        text = convert_chat(fields["messages"], fields["role_mapping"])
        return all_plain(tokenizer, text), fields, {}, []
    _check_room(model, fields, num_turns(fields["messages"]))  # before they are rendered
    fields = fields | {"messages": merged(fields["messages"], model.abilities.joins)}
    own, _ = thinking.template_args(model, fields)
    chat_args = template_args | own | fields["chat_template_kwargs"]
    return _rendered(model, fields, chat_args), fields, chat_args, given


def sampling(model: ModelTraits, prompt: Prompt, fields: Fields, args: Namespace) -> SamplingParams:
    """How the tokens after `prompt` are chosen; `args` has the defaults. Raises ValueError if a
    field is outside its range, ContextExceeded if prompt and completion do not fit together."""
    options = {"temperature": args.temp, "top_p": args.top_p, "top_k": args.top_k}
    options |= {"min_p": args.min_p, "retain": fields["cache"].get("retain")}
    options |= {name: fields[name] for name in SAMPLING if name in fields}
    if type(options.get("seed")) is int:
        options["seed"] %= 2**64
    stop_ids, least = frozenset(fields["stop_token_ids"]), fields["min_tokens"]
    num_prompt = len(prompt.tokens)
    most = _num_most(model, fields, num_prompt, args)
    ends = stop_ids.union(() if fields.get("ignore_eos") else model.tokenizer.eos_token_ids)
    forbidden = model.token_ids.with_columns(ends)

    def forbid_ends(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size < num_prompt + least:
            logits[:, mx.array(forbidden)] = -mx.inf
        return logits

    processors: list[thinking.Processor] = [forbid_ends] if least and forbidden else []
    budget, may_call = fields.get("thinking_budget"), bool(fields.get("tools"))
    if budget is not None and model.format.thinks and prompt.begin != Begin.CONTENT:
        is_open = prompt.begin == Begin.THOUGHT
        processors.append(thinking.limit(model, num_prompt, is_open, budget, may_call))
    options |= _constraint(model, prompt, fields)
    scored = fields.get("prompt_logprobs")
    if fields.get("echo") and fields["logprobs"]:
        scored = max(scored or 0, fields["top_logprobs"])
    return SamplingParams(
        max_tokens=max(most, 1),
        prompt_logprobs=scored,
        xtc_special_tokens=model.xtc_special_tokens,
        logit_bias=fields["logit_bias"],
        logprobs=fields["top_logprobs"],
        keep_space=fields.get("continue_final_message", True),
        stop_token_ids=stop_ids,
        logits_processors=tuple(processors),
        **options,
    )


def num_fitting(asked: int, room: int) -> int:
    """How many of the tokens that a request asks for the context has room for."""
    return room if asked == AS_MANY_AS_FIT else min(asked, room)


def may_answer_or_call(fields: Fields) -> bool:
    """Whether a request wants a call of a tool, or else a text that follows something."""
    return bool(fields["constraint"] and fields.get("tools") and not fields["must_call"])


def without_effect(model: ModelTraits, fields: Fields) -> list[str]:
    """The names of fields that the model cannot obey beside others."""
    can_call = constraints.leaves_calls(model.format, fields["constraint"])
    return ["tools"] if may_answer_or_call(fields) and not can_call else []


def _constraint(model: ModelTraits, prompt: Prompt, fields: Fields) -> constraints.Options:
    content: constraints.Options = fields["constraint"]
    calls = constraints.NOTHING
    if fields["must_call"]:
        content = constraints.NOTHING
        calls = constraints.of_tools(model.format, _callable(fields), fields["tool_name"])
    elif may_answer_or_call(fields) and not without_effect(model, fields):
        calls = constraints.of_tools(model.format, _callable(fields), None)
    if "messages" not in fields:
        return content
    return constraints.of_answer(model.format, prompt.begin, content, calls)


def _callable(fields: Fields) -> list[Fields]:
    """The tools that may be called; the prompt has all."""
    allowed, tools = fields.get("allowed"), fields["tools"]
    return [t for t in tools if allowed is None or t["function"]["name"] in allowed]


def _num_most(model: ModelTraits, fields: Fields, num_prompt: int, args: Namespace) -> int:
    """How many tokens may follow a prompt: what is asked for, or else the default, as far as the
    context has room. Raises ValueError, also ContextExceeded, if it has no room for what must be
    obeyed."""
    asked, least, room = fields["max_tokens"], fields["min_tokens"], model.max_context - num_prompt
    if asked is not None and asked > room and args.strict_fields:
        name = "max_completion_tokens" if fields["max_completion_tokens"] else "max_tokens"
        raise ContextExceeded(num_prompt, asked, model.max_context, name)
    most = args.max_tokens if asked is None else asked
    most = num_fitting(most if most == AS_MANY_AS_FIT else max(most, least), room)
    expected = f"at most {room}, for which the context has room behind the prompt"
    require(least <= room, "min_tokens", expected, least)
    return max(most, int(asked != 0))


def _check_room(model: ModelTraits, fields: Fields, num_prompt: int) -> None:
    """Raise ContextExceeded, which tells what the request asks for, if so many tokens of a prompt
    leave no room for an answer."""
    asked = fields["max_tokens"]
    if num_prompt + int(asked != 0) > model.max_context:
        param = "messages" if "messages" in fields else "prompt"
        num_new = 1 if asked in (None, AS_MANY_AS_FIT) else asked
        raise ContextExceeded(num_prompt, num_new, model.max_context, param)


def _of_text(model: ModelTraits, prompt: str | list[int], fields: Fields) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(_tokens(model, prompt, fields), prompt if fields["echo"] else "")
    _check_room(model, fields, len(prompt))
    return Prompt(prompt, model.tokenizer.decode(prompt) if fields["echo"] else "")


def _tokens(model: ModelTraits, text: str, fields: Fields, **options: Any) -> list[int]:
    """Token ids of a text, if its bytes can fit. Other threads run while they are computed."""
    num_bytes = len(text.encode())
    if num_bytes > model.max_context * model.longest_token:
        _check_room(model, fields, ceil(num_bytes / model.longest_token))
    with may_take_long():
        _check_room(model, fields, _least(model, text))
        tokens = encoded(model.tokenizer, text, **options)
    _check_room(model, fields, len(tokens))
    return tokens


def _least(model: ModelTraits, text: str) -> int:
    """How many tokens a long text has at least, if these do not fit; else 0. A tokenizer takes
    hundreds of bytes for each token while it encodes, so that this looks at piece after piece. It
    counts half of their tokens, for a cut may divide some."""
    if len(text.encode()) <= max(LONG, SPARSE * model.max_context):
        return 0
    most, count = 2 * model.max_context + 1, 0
    for start in range(0, len(text), PIECE):
        piece = text[start : start + PIECE]
        count += len(encoded(model.tokenizer, piece, add_special_tokens=False))
        if count > most:
            return count // 2
    return 0


def _rendered(model: ModelTraits, fields: Fields, template_args: dict[str, Any]) -> str:
    messages, continues = fields["messages"], fields["continue_final_message"]
    process_message_content([m for m in messages if not has_image(m.get("content"))])
    begins = fields["add_generation_prompt"]
    options = {"continue_final_message": True} if continues else {}
    options["add_generation_prompt"] = not continues if begins is None else begins
    return _render(model, fields["tools"], template_args | options, messages)


def _render(
    model: ModelTraits, tools: Any, options: dict[str, Any], messages: list[dict[str, Any]]
) -> str:
    messages = model.format.history(messages, bool(tools))
    messages = in_parts(messages) if model.abilities.only_parts else messages
    tools = model.format.declared(tools) if tools else None
    return rendered(model.tokenizer, messages, **options | {"tools": tools})


def _begin(model: ModelTraits, fields: Fields, template_args: dict[str, Any], text: str) -> Begin:
    """Where the answer to a prompt begins."""
    options = template_args | {"add_generation_prompt": False}
    return begin_of(
        model.format,
        fields["messages"],
        text,
        partial(_render, model, fields["tools"], options),
        adds_prompt=fields["add_generation_prompt"] is not False,
        continues=fields["continue_final_message"],
    )
