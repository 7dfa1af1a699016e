"""Checks the body of a request: each known field is obeyed or refused. Does not import mlx."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlx_paged.arguments import is_count
from mlx_paged.server import constraints
from mlx_paged.server.constraints import require

Fields = dict[str, Any]
Rule = tuple[Any, Callable[[Any], bool], str]


class Refusal(Exception):
    """The answer to a request that gets no completion, or an event in a stream that ends badly."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def as_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        named = NAMED.match(str(self)) if self.status == 400 else None
        param = named[1] if named and _is_known(named[1].partition(".")[0]) else None
        return {"error": {"message": str(self), "type": kind, "param": param, "code": self.code}}


class ContextExceeded(Refusal):
    """Prompt and completion do not fit into the context of a model.

    Args:
        num_prompt: tokens of the prompt, or the fewest that it can have.
        num_new: tokens that are asked for.
        limit: tokens that both may have.
    """

    def __init__(self, num_prompt: int, num_new: int, limit: int) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, you requested"
            f" {num_prompt + num_new} tokens ({num_prompt} in the messages, {num_new} in the"
            " completion). Please reduce the length of the messages or completion.",
            "context_length_exceeded",
        )
        self.num_prompt, self.num_new, self.limit = num_prompt, num_new, limit


@contextmanager
def refusing() -> Iterator[None]:
    """Refuse a request with the error that this context raises: a mistake of the request, or
    something that is not running or too busy."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise Refusal(400, str(error)) from error
    except RuntimeError as error:
        raise Refusal(503, str(error)) from error


SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold", "seed"),
    *("repetition_penalty", "repetition_context_size", "presence_penalty"),
    *("presence_context_size", "frequency_penalty", "frequency_context_size", "ignore_eos"),
)
"""Fields that are options of SamplingParams, which checks them."""

LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key", "num_draft_tokens"}
"""Fields that ask for nothing that would change an answer of this server."""

ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("adapters", "draft_model"), ("default_model",)),
    **dict.fromkeys(("suffix", "grammar"), ("",)),
    **dict.fromkeys(("functions", "bad_words", "documents", "logits_processors"), ([],)),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "length_penalty": (1,),
    **dict.fromkeys(("allowed_token_ids", "prompt_logprobs"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "chat_template", "audio", "prediction"), ()),
    "web_search_options": (),
}
"""Fields that are refused unless their value is one of these, which ask for nothing."""

ASIDE: dict[str, tuple[Any, ...]] = {"store": (False,), "service_tier": ("auto", "default")}
"""Fields that change no answer. Values other than these are ignored as unknown fields are."""

CONSTRAINTS = {"response_format", "structured_outputs", *(f"guided_{k}" for k in constraints.KINDS)}
"""Fields that :func:`constraints.of_fields` reads."""

NAMED = re.compile(r"(?:\[\w+\] )?([\w.]+)(?::| is | has | names )")
"""How messages name the field that is wrong."""

PART = 1 << 16  # items of a list that are checked before other threads may run

USAGE = ("include_usage", "continuous_usage_stats")

_BOOL = (lambda value: isinstance(value, bool), "true or false")
_TEXT = (lambda value: isinstance(value, str), "a string")
_OBJECT = (lambda value: isinstance(value, dict), "an object")
_COUNT = (is_count, "an integer >= 0")
_POSITIVE = (lambda value: is_count(value, 1), "an integer >= 1")


def _is_list(kind: type, value: object) -> bool:
    if not isinstance(value, list):
        return False
    parts = (value[i : i + PART] for i in range(0, len(value), PART))
    return all(set(map(type, part)) <= {kind} for part in parts)


BOTH: dict[str, Rule] = {
    "model": ("default_model", *_TEXT),
    "stream": (False, *_BOOL),
    "stream_options": (
        {},
        lambda value: isinstance(value, dict) and all(k in USAGE or not value[k] for k in value),
        "an object with include_usage or continuous_usage_stats",
    ),
    "n": (1, *_POSITIVE),
    "max_tokens": (None, *_POSITIVE),
    "max_completion_tokens": (None, *_POSITIVE),
    "min_tokens": (0, *_COUNT),
    "stop": (
        [],
        lambda value: (
            bool(value) if isinstance(value, str) else _is_list(str, value) and all(value)
        ),
        "a non-empty string or a list of them",
    ),
    "stop_token_ids": ([], lambda value: _is_list(int, value), "a list of token ids"),
    "priority": (0, lambda value: type(value) is int, "an integer"),
    "cache_salt": ("", *_TEXT),
    "logit_bias": ({}, *_OBJECT),
    "logprobs": (
        False,
        lambda value: is_count(value) or isinstance(value, bool),
        "true or a count",
    ),
    "top_logprobs": (0, lambda value: is_count(value) and value <= 20, "from 0 to 20"),
}
CHAT: dict[str, Rule] = {
    "messages": (None, lambda value: bool(value) and _is_list(dict, value), "a list of objects"),
    "tools": ([], lambda value: _is_list(dict, value), "a list of objects"),
    "tool_choice": (
        "auto",
        lambda value: value in ("auto", "none", "required") or _named_tool(value) is not None,
        "auto, none, required or a function's name in OpenAI's form",
    ),
    "parallel_tool_calls": (True, *_BOOL),
    "chat_template_kwargs": ({}, *_OBJECT),
    "role_mapping": ({}, *_OBJECT),
    "continue_final_message": (False, *_BOOL),
    "add_generation_prompt": (None, *_BOOL),
}
TEXT: dict[str, Rule] = {
    "prompt": (None, lambda value: isinstance(value, str | list), "text or token ids"),
    "echo": (False, *_BOOL),
    "best_of": (None, *_POSITIVE),
}


def _is_known(name: str) -> bool:
    tables = BOTH, CHAT, TEXT, SAMPLING, LABELS, ONLY, ASIDE, CONSTRAINTS
    return name.startswith("guided_") or any(name in table for table in tables)


def parse(raw: bytes) -> Fields:
    """The JSON object that a body is. Raises ValueError if it is none."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:  # bad UTF-8 raises a ValueError
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("the body is not a JSON object")
    return body


def read(body: Fields, is_chat: bool, max_samples: int) -> tuple[Fields, list[str]]:
    """The known fields with defaults for missing ones, and the names of fields that are ignored.
    `constraint` becomes what the text must follow, as an option of SamplingParams; `must_call`
    whether a tool must be called, and `tool_name` which one, or None; `prompt` a list of texts and
    lists of token ids, `stop` a list, `logit_bias` numbers by token id; `logprobs` whether entries
    are wanted, `best_of` how many are generated. Fields of SAMPLING have no default. Raises
    ValueError, which names the field, if one cannot be obeyed."""
    rules = BOTH | (CHAT if is_chat else TEXT)
    fields, unknown = {name: default for name, (default, *_) in rules.items()}, []
    for name, value in body.items():
        if value is None or name in LABELS or name in CONSTRAINTS:
            continue
        if name in ONLY or name.startswith("guided_"):
            only = ONLY.get(name, ())
            require(value in only, name, " or ".join(map(repr, only)) or "nothing", value)
        if name in rules:
            require(rules[name][1](value), name, rules[name][2], value)
        if name in rules or name in SAMPLING:
            fields[name] = value
        elif name not in ONLY and value not in ASIDE.get(name, ()):
            unknown.append(name)
    fields["constraint"] = constraints.of_fields(body)
    _adapt(fields, max_samples)
    return fields, sorted(unknown)


def _adapt(fields: Fields, max_samples: int) -> None:
    n, stop = fields["n"], fields["stop"]
    count = fields["best_of"] = fields.get("best_of") or n
    require(n <= max_samples, "n", f"an integer from 1 to {max_samples}", n)
    require(n <= count <= max_samples, "best_of", f"from n to {max_samples}", count)
    require(count == n or not fields["stream"], "best_of", "n in a stream", count)
    fields["stop"] = [stop] if isinstance(stop, str) else stop
    fields["max_tokens"] = fields["max_completion_tokens"] or fields["max_tokens"]
    most = fields["max_tokens"] or fields["min_tokens"]
    require(fields["min_tokens"] <= most, "min_tokens", "at most max_tokens", fields["min_tokens"])
    try:
        fields["logit_bias"] = {int(key): float(x) for key, x in fields["logit_bias"].items()}
    except (ValueError, TypeError):
        raise ValueError("logit_bias: expected numbers by token id") from None
    if not isinstance(fields["logprobs"], bool):  # the number in requests for texts
        fields["top_logprobs"], fields["logprobs"] = fields["logprobs"], True
    fields["logprobs"] = fields["logprobs"] or fields["top_logprobs"] > 0
    _adapt_tools(fields)
    is_free = not fields["constraint"] or not fields["min_tokens"]
    require(is_free, "min_tokens", "nothing beside a grammar", fields["min_tokens"])
    if "messages" in fields:
        _check_messages(fields["messages"])
        is_one = not (fields["continue_final_message"] and fields["add_generation_prompt"])
        require(is_one, "add_generation_prompt", "false beside continue_final_message", True)
        return
    prompt, beside = fields["prompt"], fields["echo"] and fields["logprobs"]
    require(not beside, "logprobs", "nothing beside echo", True)
    is_one = isinstance(prompt, str) or (bool(prompt) and type(prompt[0]) is int)
    fields["prompt"] = prompts = [prompt] if is_one else prompt
    is_valid = prompts and (_is_list(str, prompts) or all(_is_list(int, item) for item in prompts))
    require(is_valid, "prompt", "text or token ids, or a list of texts or of token ids", prompt)


def _named_tool(choice: Any) -> str | None:
    """The function that a `tool_choice` names."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _adapt_tools(fields: Fields) -> None:
    choice = fields.get("tool_choice", "none")
    if choice == "none":
        fields["tools"] = []
    fields["tool_name"] = _named_tool(choice)
    fields["must_call"] = must_call = choice not in ("auto", "none")
    require(not must_call or fields["tools"], "tool_choice", "auto without tools", choice)
    is_one = not (must_call and (fields["constraint"] or fields["min_tokens"]))
    require(is_one, "tool_choice", "auto beside a grammar or min_tokens", choice)


def _check_messages(messages: Any) -> None:
    require(messages, "messages", "a list that is not empty", messages)
    for message in messages:
        has_role = isinstance(message.get("role"), str)
        require(has_role, "messages", "objects with a role", message)
        content = message.get("content", "")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            is_text = isinstance(part, dict) and part.get("type") == "text"
            is_text = is_text and isinstance(part.get("text"), str | None)
            require(is_text, "messages", "content that is text", part)
