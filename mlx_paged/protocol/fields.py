"""What becomes of each field of a request: tables. Does not import mlx."""

from collections.abc import Callable, Mapping
from typing import Any

from mlx_paged.arguments import is_count
from mlx_paged.protocol import constraints
from mlx_paged.request import BACKGROUND
from mlx_paged.sampling_params import WEEK, is_within

Fields = dict[str, Any]
Rule = tuple[Any, Callable[[Any], bool], str]
"""A field's default, the check of its value, and what that expects."""

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold", "seed"),
    *("repetition_penalty", "repetition_context_size", "presence_penalty"),
    *("presence_context_size", "frequency_penalty", "frequency_context_size", "ignore_eos"),
)
"""Fields that are options of SamplingParams, which checks them."""

FLEX = "flex"
"""The `service_tier` of a request of the background."""


def is_flex(body: Mapping[str, Any]) -> bool:
    """Whether a body asks for the background by its `service_tier`."""
    return body.get("service_tier") == FLEX


NOTES = {"service_tier": f'"{FLEX}" is the background'}
"""What fields that every API has mean here."""

GUIDED_TEXTS = "guided_regex", "guided_grammar"
"""Fields whose text constrains the answer."""

LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key", "num_draft_tokens"}
LABELS |= {"client_metadata", "prompt_cache_options", "cache_control"}
LABELS |= {"anthropic_version", "betas"}
"""Fields that ask for nothing that would change an answer of this server."""

ONLY: dict[str, tuple[Any, ...]] = {
    "draft_model": ("default_model",),
    **dict.fromkeys(("suffix", "grammar"), ("",)),
    **dict.fromkeys(("functions", "bad_words", "documents", "logits_processors"), ([],)),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "length_penalty": (1,),
    **dict.fromkeys(("allowed_token_ids", "prompt_logprobs"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "chat_template", "audio", "prediction"), ()),
    **dict.fromkeys(("web_search_options", "moderation"), ()),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), ()),
    "background": (False,),
}
"""Fields that are refused unless their value is one of these, which ask for nothing."""

OWN: dict[str, set[str]] = {
    "messages": {
        *("messages", "system", "stop_sequences", "tools", "tool_choice", "output_config"),
        *("output_format", "thinking"),
    },
    "responses": {
        *("input", "instructions", "max_output_tokens", "include", "reasoning", "text", "tools"),
        "tool_choice",
    },
}
"""Fields of the other APIs that bodies for chat completions have in another form, or not at all."""

ASIDE: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default", "standard_only", FLEX),
    "truncation": ("disabled",),
    "speed": ("standard",),
    "verbosity": ("medium",),
    **dict.fromkeys(("access_programs", "background_options", "image", "max_tool_calls"), ()),
    **dict.fromkeys(("container", "context_management", "diagnostics", "inference_geo"), ()),
    **dict.fromkeys(("user_profile_id", "workspace_id"), ()),
}
"""Fields that change no answer. Values other than these are ignored as unknown fields are."""

CONSTRAINTS = {"response_format", "structured_outputs", *(f"guided_{k}" for k in constraints.KINDS)}
"""Fields that :func:`constraints.of_fields` reads."""

RANGES = {"seed": (-(2**63), 2**64 - 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}
RANGES["repetition_penalty"] = (0, 100)
"""OpenAI's ranges of fields that :data:`SAMPLING` has, what mlx-lm takes as a seed, and a penalty
that keeps logits within float32."""

MAX_SAMPLES = 16  # completions of a request, unless a flag says otherwise
MAX_STOPS = 256  # stop strings of a request; each is looked for after each token
MAX_STOP = 1 << 14  # characters of all of them
MAX_ROLES = 100  # that a request may map
PART = 1 << 16  # items of a list that are checked before other threads may run

AS_MANY_AS_FIT = -1
"""The `max_tokens` of a request that may fill the context."""

USAGE = ("include_usage", "continuous_usage_stats")

_BOOL = (lambda value: isinstance(value, bool), "true or false")
_TEXT = (lambda value: isinstance(value, str), "a string")
_OBJECT = (lambda value: isinstance(value, dict), "an object")
_COUNT = (is_count, "an integer >= 0")
_POSITIVE = (lambda value: is_count(value, 1), "an integer >= 1")
_MOST = (lambda value: is_count(value, 1) or _is_all(value), "an integer >= 1")
_FEW = (lambda value: is_count(value) and value <= 20, "from 0 to 20")


def _is_all(value: object) -> bool:
    return type(value) is int and value == AS_MANY_AS_FIT


def is_list(kind: type, value: object) -> bool:
    if not isinstance(value, list):
        return False
    parts = (value[i : i + PART] for i in range(0, len(value), PART))
    return all(set(map(type, part)) <= {kind} for part in parts)


def is_stop(value: object) -> bool:
    """Whether `value` is a stop string or a list of stop strings, within the limits."""
    texts = [value] if isinstance(value, str) else value
    if not (isinstance(texts, list) and len(texts) <= MAX_STOPS and is_list(str, texts)):
        return False
    return all(texts) and sum(map(len, texts)) <= MAX_STOP


def is_cache(value: object) -> bool:
    """Whether `value` says what becomes of K/V."""
    if not isinstance(value, dict) or value.keys() - {"retain"}:
        return False
    retain = value.get("retain")
    return retain in (None, "pin", "drop") or is_within(retain, 0, WEEK)


RETENTIONS: dict[str, float] = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86400.0}
"""Seconds for which the K/V of a prompt is worth more, by `prompt_cache_retention`."""


def is_retention(value: object) -> bool:
    """Whether `value` is one of :data:`RETENTIONS`."""
    return isinstance(value, str) and value in RETENTIONS


def is_mapping(value: object) -> bool:
    """Whether `value` gives texts for a few roles."""
    return (
        isinstance(value, dict)
        and len(value) <= MAX_ROLES
        and all(isinstance(each, str) for each in value.values())
    )


def named_tool(choice: Any) -> str | None:
    """The function that a `tool_choice` names."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def allowed_tools(choice: Any) -> list[str] | None:
    """The functions that a `tool_choice` of the type allowed_tools lists; None for another one."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        return None
    tools = allowed.get("tools")
    names = [named_tool(tool) for tool in tools] if isinstance(tools, list) else []
    known = [name for name in names if name is not None]
    return known if known and len(known) == len(names) else None


def is_tool_choice(value: Any) -> bool:
    """Whether `value` has a form of `tool_choice`."""
    is_mode = isinstance(value, str) and value in ("auto", "none", "required")
    return is_mode or named_tool(value) is not None or allowed_tools(value) is not None


BOTH: dict[str, Rule] = {
    "model": ("default_model", *_TEXT),
    "adapters": (None, *_TEXT),
    "stream": (False, *_BOOL),
    "stream_options": (
        {},
        lambda value: isinstance(value, dict) and all(k in USAGE or not value[k] for k in value),
        "an object with include_usage or continuous_usage_stats",
    ),
    "n": (1, *_POSITIVE),
    "max_tokens": (None, *_MOST),
    "max_completion_tokens": (None, *_MOST),
    "min_tokens": (0, *_COUNT),
    "stop": (
        [],
        is_stop,
        f"a non-empty string, or at most {MAX_STOPS} of them with {MAX_STOP} characters in all",
    ),
    "stop_token_ids": (
        [],
        lambda value: is_list(int, value) and all(0 <= each < 2**31 for each in value),
        "a list of token ids",
    ),
    "priority": (
        0,
        lambda value: (type(value) is int and abs(value) < 2**31) or value == BACKGROUND,
        'an integer above -2147483648 and below 2147483648, or "background"',
    ),
    "cache_salt": ("", *_TEXT),
    "cache": ({}, is_cache, f'an object with retain: "pin", "drop" or seconds from 0 to {WEEK}'),
    "prompt_cache_retention": (None, is_retention, f"one of {', '.join(RETENTIONS)}"),
    "logit_bias": ({}, *_OBJECT),
    "logprobs": (
        False,
        lambda value: isinstance(value, bool) or (is_count(value) and value <= 20),
        "true, false or a count from 0 to 20",
    ),
    "top_logprobs": (0, *_FEW),
}
CHAT: dict[str, Rule] = {
    "messages": (
        None,
        lambda value: bool(value) and is_list(dict, value),
        "a list of objects, at least one",
    ),
    "tools": ([], lambda value: is_list(dict, value), "a list of objects"),
    "tool_choice": (
        "auto",
        is_tool_choice,
        "auto, none, required, or a function's name or allowed_tools in OpenAI's form",
    ),
    "parallel_tool_calls": (True, *_BOOL),
    "chat_template_kwargs": ({}, *_OBJECT),
    "reasoning_effort": (None, *_TEXT),
    "enable_thinking": (None, *_BOOL),
    "thinking_budget": (None, *_COUNT),
    "role_mapping": ({}, is_mapping, f"an object with texts for at most {MAX_ROLES} roles"),
    "continue_final_message": (False, *_BOOL),
    "add_generation_prompt": (None, *_BOOL),
}
TEXT: dict[str, Rule] = {
    "prompt": (None, lambda value: isinstance(value, str | list), "text or token ids"),
    "echo": (False, *_BOOL),
    "best_of": (None, *_POSITIVE),
    "max_tokens": (None, lambda value: is_count(value) or _is_all(value), "an integer >= 0"),
    "prompt_logprobs": (None, *_FEW),
}


def all_fields() -> set[str]:
    """Every field that a table names."""
    tables = BOTH, CHAT, TEXT, SAMPLING, LABELS, ONLY, ASIDE, CONSTRAINTS, *OWN.values()
    return {name for table in tables for name in table}


API_OF = {"chat": CHAT, "completions": TEXT, "messages": CHAT, "responses": CHAT}
"""By API: rules beside :data:`BOTH`."""


def treatment(api: str, name: str) -> str:
    """What an API does with a field: "obeyed", "refused", "ignored by name" or "changes no answer";
    the second and the third may go on with values for which that does not hold."""
    if (api, name) == ("responses", "messages"):
        return "refused"
    if name in OWN.get(api, ()) or name in BOTH or name in API_OF[api]:
        return "obeyed"
    if name in SAMPLING or name in CONSTRAINTS:
        return "obeyed"
    if name in LABELS:
        return "changes no answer"
    unless = " or ".join(repr(x) for x in ONLY.get(name, ASIDE.get(name, ())))
    what = "refused" if name in ONLY else "ignored by name"
    return f"{what}, unless {unless}" if unless else what
