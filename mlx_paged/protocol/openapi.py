"""The server's API as an OpenAPI document, made of the tables of fields. Imports no mlx."""

from collections.abc import Iterable
from dataclasses import fields as dataclass_fields
from typing import Any

from mlx_paged.protocol.fields import (
    API_OF,
    ASIDE,
    BOTH,
    GUIDED_TEXTS,
    MAX_ROLES,
    MAX_STOPS,
    NOTES,
    ONLY,
    RANGES,
    RETENTIONS,
    USAGE,
    all_fields,
    treatment,
)
from mlx_paged.request import BACKGROUND
from mlx_paged.sampling_params import WEEK, SamplingParams

Schema = dict[str, Any]

VERSION = "3.1.0"  # of OpenAPI; its schemas are those of JSON Schema 2020-12

_BOOL: Schema = {"type": "boolean"}
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_NUMBER: Schema = {"type": "number"}

_COUNT: Schema = {"type": "integer", "minimum": 0}
_POSITIVE: Schema = {"type": "integer", "minimum": 1}
_FEW: Schema = {"type": "integer", "minimum": 0, "maximum": 20}
_MOST: Schema = {"anyOf": [_POSITIVE, {"const": -1}]}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_TOKENS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
}
_STOPS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
_STOPS |= {"maxItems": MAX_STOPS}


def _between(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


SCHEMAS: dict[str, Schema] = {
    **dict.fromkeys(("model", "adapters", "cache_salt", "reasoning_effort"), _TEXT),
    **dict.fromkeys(("stream", "parallel_tool_calls", "enable_thinking", "echo"), _BOOL),
    **dict.fromkeys(("continue_final_message", "add_generation_prompt", "ignore_eos"), _BOOL),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), _OBJECT),
    **dict.fromkeys(("structured_outputs", "thinking", "output_config"), _OBJECT),
    **dict.fromkeys(("output_format", "reasoning", "text"), _OBJECT),
    **dict.fromkeys(("n", "best_of"), _POSITIVE),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _MOST),
    **dict.fromkeys(("min_tokens", "thinking_budget", "top_k"), _COUNT),
    **dict.fromkeys(("top_logprobs", "prompt_logprobs"), _FEW),
    **dict.fromkeys(("top_p", "min_p", "xtc_probability"), _between(0, 1)),
    **dict.fromkeys(("presence_context_size", "frequency_context_size"), _COUNT),
    **dict.fromkeys((*GUIDED_TEXTS, "instructions"), _TEXT),
    **{name: _between(*ends) for name, ends in RANGES.items()},
    "seed": {"type": "integer", "minimum": RANGES["seed"][0], "maximum": RANGES["seed"][1]},
    "repetition_context_size": _COUNT,
    "temperature": {"type": "number", "minimum": 0},
    "xtc_threshold": _between(0, 0.5),
    "stream_options": {"type": "object", "properties": {name: {} for name in USAGE}},
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, _STOPS]},
    "stop_sequences": _STOPS,
    "stop_token_ids": _TOKENS,
    "prompt_cache_retention": {"enum": [*RETENTIONS]},
    "priority": {
        "anyOf": [
            {"type": "integer", "minimum": 1 - 2**31, "maximum": 2**31 - 1},
            {"const": BACKGROUND},
        ]
    },
    "cache": {
        "type": "object",
        "properties": {
            "retain": {"anyOf": [{"enum": [None, "pin", "drop"]}, _between(0, WEEK)]},
        },
        "additionalProperties": False,
    },
    "logprobs": {"anyOf": [_BOOL, _FEW]},
    "messages": _OBJECTS | {"minItems": 1},
    "tools": _OBJECTS,
    "tool_choice": {"type": ["string", "object"]},
    "role_mapping": {
        "type": "object",
        "maxProperties": MAX_ROLES,
        "additionalProperties": _TEXT,
    },
    "prompt": {"type": ["string", "array"]},
    "response_format": {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
    },
    "guided_json": {"type": ["string", "object"]},
    "guided_choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    "system": {"type": ["string", "array"]},
    "input": {"type": ["string", "array"]},
    "include": {"type": "array", "items": _TEXT},
}
"""What obeyed fields may be, as far as a schema says it; the server checks more."""

IN_API: dict[tuple[str, str], Schema] = {
    ("completions", "max_tokens"): {"anyOf": [_COUNT, {"const": -1}]},
}
"""Schemas of fields that one API has otherwise."""

REQUIRED = {"completions": "prompt", "chat": "messages", "messages": "messages"}
REQUIRED["responses"] = "input"
"""By API: the field that each request has."""

_RANGES = {
    each.name: each.metadata["range"][1]
    for each in dataclass_fields(SamplingParams)
    if "range" in each.metadata
}

TITLES = {
    "completions": "Completions, as in OpenAI's API",
    "chat": "Chat completions, as in OpenAI's API",
    "messages": "Anthropic's Messages API",
    "responses": "OpenAI's Responses API, which keeps no answers",
}


def body_schema(api: str) -> Schema:
    """The schema of the bodies of an API: obeyed fields, and those that one of some values may
    have. Other fields are allowed, and ignored unless the server is strict."""
    properties = {}
    for name in sorted(all_fields()):
        what = treatment(api, name)
        only = ONLY.get(name, ASIDE.get(name, ()))
        if what == "obeyed":
            rules = BOTH | API_OF[api]
            words = rules[name][2] if name in rules else _RANGES.get(name, "")
            schema = IN_API.get((api, name), SCHEMAS[name])
            found = {"anyOf": [schema, {"type": "null"}]}
            properties[name] = found | ({"description": words} if words else {})
        elif what == "changes no answer":
            properties[name] = {"description": what}
        elif what.startswith("refused"):
            properties[name] = {"enum": [*only, None], "description": what}
    properties |= {name: {"description": note} for name, note in NOTES.items()}
    return {"type": "object", "properties": properties, "required": [REQUIRED[api]]}


def document(
    bodies: dict[str, str], posts: Iterable[str], gets: dict[str, bool], has_keys: bool
) -> Schema:
    """The OpenAPI document of a server.

    Args:
        bodies: the API of each path whose bodies are completions, chats, messages or responses.
        posts: other paths that take a JSON object.
        gets: paths that have no body, and whether each is open to clients without a key.
        has_keys: whether clients need a key.
    """
    paths: dict[str, Schema] = {
        path: {"post": _operation(TITLES[api], {"$ref": f"#/components/schemas/{api}"}, True)}
        for path, api in bodies.items()
    }
    paths |= {path: {"post": _operation(f"POST {path}", _OBJECT, False)} for path in posts}
    for path, is_open in gets.items():
        operation = _operation(f"GET {path}", None, False)
        paths[path] = {"get": operation | ({"security": []} if is_open and has_keys else {})}
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": VERSION,
        "info": {"title": "mlx_paged", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {api: body_schema(api) for api in API_OF},
            "securitySchemes": schemes,
        },
        **({"security": [{name: []} for name in schemes]} if has_keys else {}),
    }


def _operation(summary: str, body: Schema | None, streams: bool) -> Schema:
    kinds: Schema = {"application/json": {}} | ({"text/event-stream": {}} if streams else {})
    answer = {"description": "the answer", **({"content": kinds} if body is not None else {})}
    refused = {"description": "a refusal or a failure; the message names the field"}
    found: Schema = {"summary": summary, "responses": {"200": answer, "default": refused}}
    if body is not None:
        content = {"application/json": {"schema": body}}
        found["requestBody"] = {"required": True, "content": content}
    return found
