"""Checks the body of a request: each known field is obeyed or refused. Does not import mlx."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from mlx_paged.protocol import constraints
from mlx_paged.protocol.constraints import require, require_json
from mlx_paged.protocol.fields import (
    AS_MANY_AS_FIT,
    ASIDE,
    BOTH,
    CHAT,
    CONSTRAINTS,
    LABELS,
    ONLY,
    RANGES,
    SAMPLING,
    TEXT,
    Fields,
    all_fields,
    allowed_tools,
    is_flex,
    is_list,
    named_tool,
)
from mlx_paged.protocol.images import image_part, joined, of_result
from mlx_paged.protocol.json_text import check_fields
from mlx_paged.request import BACKGROUND, PoolShrunkError
from mlx_paged.sampling_params import CompilerBusy
from mlx_paged.vision.images import has_image, is_image, parts_of

LONGEST_MESSAGE = 2000  # characters: a field's name, and what a template says, may be long


class Refusal(Exception):
    """The answer to a request that gets no completion, or an event in a stream that ends badly."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int = 1,
    ) -> None:
        super().__init__(message[:LONGEST_MESSAGE])
        self.retry_after_s = retry_after_s  # of a server that is overloaded
        self.status = status
        self.code = code
        self.param = param  # the field that is wrong; None: the message may name it

    def as_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        named = NAMED.match(str(self)) if self.status == 400 else None
        param = named[1] if named and _is_known(named[1]) else self.param
        return {"error": {"message": str(self), "type": kind, "param": param, "code": self.code}}


class ContextExceeded(Refusal):
    """Prompt and completion do not fit into the context of a model.

    Args:
        num_prompt: tokens of the prompt, or the fewest that it can have.
        num_new: tokens that are asked for.
        limit: tokens that both may have.
        param: the field that is too large.
    """

    def __init__(self, num_prompt: int, num_new: int, limit: int, param: str) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, you requested"
            f" {num_prompt + num_new} tokens ({num_prompt} in the messages, {num_new} in the"
            " completion). Please reduce the length of the messages or completion.",
            "context_length_exceeded",
            param,
        )
        self.num_prompt, self.num_new, self.limit = num_prompt, num_new, limit


INSTEAD = {"prompt": "messages in its place", "messages": "prompt in its place"}
"""What a request needs in the place of a field of the other API."""


@contextmanager
def refusing(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Refuse a request with the error that this context raises: a mistake of the request, or
    something that is not running or too busy. `names` has what fields of chat completions are
    called by the request's API."""
    try:
        yield
    except PoolShrunkError as error:
        message = str(error).removeprefix("[add_request] ")
        raise Refusal(503, message, "overloaded", retry_after_s=SHRUNK_S) from error
    except (ValueError, RecursionError) as error:
        message = str(error).removeprefix("[SamplingParams] ")
        named = NAMED.match(message)
        if named and named[1] in (names or {}):
            message = (names or {})[named[1]] + message[named.end(1) :]
        raise Refusal(400, message) from error
    except ContextExceeded as error:
        error.param = (names or {}).get(str(error.param), error.param)
        raise
    except CompilerBusy as error:
        raise Refusal(503, str(error).removeprefix("[SamplingParams] "), "overloaded") from error
    except RuntimeError as error:
        raise Refusal(503, str(error)) from error


SHRUNK_S = 60
"""Seconds after which a request may be sent again that is too long for a pool that has shrunk. The
pool takes minutes to grow, but clients of OpenAI wait at most so long by themselves."""

NAMED = re.compile(r"(?:\[\w+\] )?(\w[\w.\[\]]*)(?::| is | has | names )")
"""How messages name the field that is wrong."""


def _is_known(name: str) -> bool:
    return name.startswith("guided_") or re.split(r"[.\[]", name)[0] in all_fields()


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
LIKENESS = 0.86
"""Of a name in a message that is taken for a misspelt one of KEYS: that of "contents", but not that
of "context"."""
LONGEST = 24  # characters of such a name
MAX_KEYS = 1000  # other names that all messages may have, and arguments of a template
LONGEST_NAME = 80  # characters of an unknown field's name that are told
LONGEST_USER = 256  # characters of a user's name that count
LEAST_PENALTY = 0.01  # divides logits, which would leave the range of float32
MAX_BIASES = 1 << 16  # entries of `logit_bias`, whose keys become integers


def read(body: Fields, is_chat: bool, max_samples: int) -> tuple[Fields, list[str]]:
    """The known fields with defaults for missing ones, and the names of fields that are ignored.

    Fields of SAMPLING have no default. These fields are not as the client sends them:

    - `user`: the name of the client's user, or "".
    - `constraint`: what the text must follow, as an option of SamplingParams.
    - `constrained_by`: the name of the field that asks for `constraint`.
    - `must_call`: whether a tool must be called.
    - `tool_name`: the tool that must be called, or None.
    - `allowed`: the names of tools that may be called, or None.
    - `prompt`: a list of texts and lists of token ids.
    - `stop`: a list.
    - `logit_bias`: numbers by token id.
    - `logprobs`: whether entries are wanted.
    - `best_of`: how many choices are generated.

    Raises ValueError, which names the field, if one cannot be obeyed."""
    check_fields(body)
    rules = BOTH | (CHAT if is_chat else TEXT)
    fields, unknown = {name: default for name, (default, *_) in rules.items()}, []
    for name, value in body.items():
        if value is None or name in LABELS or name in CONSTRAINTS:
            continue
        if (name in ONLY and name not in rules) or name.startswith("guided_"):
            only = ONLY.get(name, ())
            expected = " or ".join(map(repr, only)) or INSTEAD.get(name, "nothing")
            require(value in only, name, expected, value)
        if name in rules:
            require(rules[name][1](value), name, rules[name][2], value)
        if name in rules or name in SAMPLING:
            fields[name] = value
        elif name not in ONLY and value not in ASIDE.get(name, ()):
            unknown.append(name[:LONGEST_NAME])
    fields["constrained_by"], fields["constraint"] = constraints.of_fields(body)
    if is_flex(body):
        fields["priority"] = BACKGROUND
    fields["user"] = _user(body)
    _adapt(fields, max_samples)
    return fields, sorted(unknown)


def _user(body: Fields) -> str:
    """The name of the client's user, cut to a length; "": the request has none."""
    names = (body.get(name) for name in ("safety_identifier", "user"))
    return next((name[:LONGEST_USER] for name in names if isinstance(name, str) and name), "")


def _adapt(fields: Fields, max_samples: int) -> None:
    n, stop = fields["n"], fields["stop"]
    count = fields["best_of"] = fields.get("best_of") or n
    require(n <= max_samples, "n", f"an integer from 1 to {max_samples}", n)
    require(n <= count <= max_samples, "best_of", f"from n to {max_samples}", count)
    require(count == n or not fields["stream"], "best_of", "n in a stream", count)
    fields["stop"] = [stop] if isinstance(stop, str) else stop
    fields["max_tokens"] = fields["max_completion_tokens"] or fields["max_tokens"]
    least, most = fields["min_tokens"], fields["max_tokens"]
    is_above = most not in (None, 0, AS_MANY_AS_FIT) and least > most
    require(not is_above, "min_tokens", "at most max_tokens", least)
    for name, (low, high) in RANGES.items():
        value = fields.get(name, 0)
        is_number = isinstance(value, int | float)  # SamplingParams refuses other things
        require(not is_number or low <= value <= high, name, f"from {low} to {high}", value)
    penalty = fields.get("repetition_penalty", 0)
    is_tiny = isinstance(penalty, int | float) and 0 < penalty < LEAST_PENALTY
    require(not is_tiny, "repetition_penalty", f"0, or {LEAST_PENALTY} or more", penalty)
    fields["logit_bias"] = _biases(fields["logit_bias"])
    if not isinstance(fields["logprobs"], bool):  # the number in requests for texts
        fields["top_logprobs"], fields["logprobs"] = fields["logprobs"], True
    fields["logprobs"] = fields["logprobs"] or fields["top_logprobs"] > 0
    _check_template_args(fields.get("chat_template_kwargs", {}))
    _adapt_tools(fields)
    is_free = not fields["constraint"] or not fields["min_tokens"]
    require(is_free, "min_tokens", "nothing beside a grammar", fields["min_tokens"])
    if "messages" in fields:
        require(fields["messages"], "messages", "a list that is not empty", fields["messages"])
        _check_messages(fields["messages"], {*ROLES, *fields["role_mapping"]})
        is_one = not (fields["continue_final_message"] and fields["add_generation_prompt"])
        require(is_one, "add_generation_prompt", "false beside continue_final_message", True)
        return
    prompt, scores = fields["prompt"], fields["prompt_logprobs"] is not None
    scores = scores or (fields["echo"] and fields["logprobs"])
    expected = "false beside log-probabilities of the prompt"
    require(not (scores and fields["stream"]), "stream", expected, True)
    require(fields["max_tokens"] != 0 or fields["echo"], "max_tokens", "1 or more without echo", 0)
    is_one = isinstance(prompt, str) or (bool(prompt) and type(prompt[0]) is int)
    fields["prompt"] = prompts = [prompt] if is_one else prompt
    is_valid = prompts and (is_list(str, prompts) or all(is_list(int, item) for item in prompts))
    require(is_valid, "prompt", "text or token ids, or a list of texts or of token ids", prompt)


def _biases(given: Fields) -> dict[int, float]:
    """The numbers of `logit_bias` by token id."""
    require(len(given) <= MAX_BIASES, "logit_bias", f"at most {MAX_BIASES} token ids", len(given))
    is_id = all(key.isascii() and key.isdecimal() and len(key) <= 10 for key in given)
    is_number = all(type(value) in (int, float) for value in given.values())
    require(is_id and is_number, "logit_bias", "numbers by token id", given)
    is_small = all(-100 <= value <= 100 for value in given.values())
    require(is_small, "logit_bias", "numbers from -100 to 100", given)
    return {int(key): float(value) for key, value in given.items()}


def _check_template_args(given: Fields) -> None:
    """Raise ValueError if arguments of the chat template are arguments of its rendering, or too
    many."""
    expected = f"at most {MAX_KEYS} arguments of the template"
    require(len(given) <= MAX_KEYS, "chat_template_kwargs", expected, len(given))
    from mlx_paged.chat.rendering import reserved_names  # it loads transformers

    for name in sorted(reserved_names().intersection(given)):
        is_field = name in ("tools", "add_generation_prompt", "continue_final_message")
        expected = f"the request's field {name}" if is_field else "only arguments of the template"
        require(False, f"chat_template_kwargs.{name}", expected, given[name])


def _adapt_tools(fields: Fields) -> None:
    choice = fields.get("tool_choice", "none")
    for i, tool in enumerate(fields.get("tools", ())):
        kind = tool.get("type", "function")
        require(kind == "function", f"tools[{i}].type", "function", kind)
        _function(tool, f"tools[{i}]")
    fields["allowed"] = _allowed(choice, fields)
    if fields["allowed"] is not None:
        fields["tool_choice"] = choice = choice["allowed_tools"]["mode"]
    if choice == "none":
        fields["tools"] = []
    fields["tool_name"] = named_tool(choice)
    fields["must_call"] = must_call = choice not in ("auto", "none")
    fields["constrained_by"] = "tools" if must_call else fields["constrained_by"]
    require(not must_call or fields["tools"], "tool_choice", "auto without tools", choice)
    is_free = not must_call or not fields["min_tokens"]
    require(is_free, "tool_choice", "auto beside min_tokens", choice)


def _allowed(choice: Any, fields: Fields) -> frozenset[str] | None:
    """The names that a `tool_choice` of the type allowed_tools lists; None: every name."""
    names = allowed_tools(choice)
    if names is None:
        return None
    known = {tool["function"]["name"] for tool in fields["tools"]}
    for name in names:
        require(name in known, "tool_choice", "names of tools", name)
    return frozenset(names)


def _check_messages(messages: list[Fields], roles: set[str]) -> None:
    names = set[str]().union(*messages).difference(KEYS)
    expected = f"at most {MAX_KEYS} names beside {', '.join(KEYS)}"
    require(len(names) <= MAX_KEYS, "messages", expected, len(names))
    for i, message in enumerate(messages):
        name, role = f"messages[{i}]", message.get("role")
        expected = f"{', '.join(ROLES)} or a key of role_mapping"
        require(isinstance(role, str) and role in roles, f"{name}.role", expected, role)
        for key in message.keys() - KEYS:  # others are the template's
            is_near = len(key) <= LONGEST and _is_misspelt(key)
            require(not is_near, f"{name}.{key}", f"a known name, such as {', '.join(KEYS)}", key)
        if role == "developer":  # OpenAI's newer name, which few templates know
            message["role"] = "system"
        if role == "assistant":
            _tell_refusal(message, name)
        has_content = "content" in message or role == "assistant"
        require(has_content, f"{name}.content", "text", "nothing")
        if role == "tool" and has_image(message.get("content")):
            message["content"] = of_result(message["content"])
        parts = parts_of(message.get("content"))
        for j, part in enumerate(parts):
            if role in ("user", "tool") and is_image(part):
                parts[j] = image_part(part, f"{name}.content[{j}]")
                continue
            is_text = isinstance(part, dict) and part.get("type") == "text"
            is_text = is_text and isinstance(part.get("text"), str | None)
            require(is_text, f"{name}.content", "text", part)
        answers = message.get("tool_call_id")
        is_answer = role != "tool" or isinstance(answers, str)
        require(is_answer, f"{name}.tool_call_id", "the id of a call", answers)
        calls = message.get("tool_calls") or []
        require(is_list(dict, calls), f"{name}.tool_calls", "a list of objects", calls)
        for j, call in enumerate(calls):
            function = _function(call, f"{name}.tool_calls[{j}]")
            require_json(function.get("arguments"), f"{name}.tool_calls[{j}].function.arguments")


def _tell_refusal(message: Fields, name: str) -> None:
    """What an assistant has refused becomes text of its message, which templates know."""
    content, refusal = message.get("content"), message.pop("refusal", None)
    require(isinstance(refusal, str | None), f"{name}.refusal", "a text", refusal)
    if isinstance(content, list):
        message["content"] = content = [
            {"type": "text", "text": part.get("refusal")}
            if isinstance(part, dict) and part.get("type") == "refusal"
            else part
            for part in content
        ]
    if refusal:
        message["content"] = joined([content, refusal]) if content else refusal


@lru_cache(1000)
def _is_misspelt(key: str) -> bool:
    plain, *known = (name.lower().replace("_", "") for name in (key, *KEYS))
    return bool(get_close_matches(plain, known, 1, LIKENESS))


def _function(tool: Fields, name: str) -> Fields:
    """The function of a tool, or of a call. Raises ValueError, which names it, if it has none."""
    function = tool.get("function")
    is_function = isinstance(function, dict) and isinstance(function.get("name"), str)
    require(is_function, f"{name}.function", "an object with a name", function or tool)
    return dict(function or {})
