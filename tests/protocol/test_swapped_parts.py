"""Parts of bodies in the place of other parts: a body is read, or refused by a ValueError."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from mlx_paged.protocol import cache_marks, messages, request_body, responses
from mlx_paged.protocol.request_body import Refusal

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
JSON_SCHEMA = {"type": "json_schema", "name": "a", "schema": SCHEMA}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
MARK = {"type": "ephemeral", "ttl": "5m"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "r"}]},
        {"role": "assistant", "content": None, "refusal": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    },
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "stream_options": {"include_usage": True},
    "logit_bias": {"1": 1},
    "cache": {"retain": "pin"},
    "role_mapping": {"a": "b"},
    "chat_template_kwargs": {"a": 1},
    "stop": ["a"],
}
TEXTS: dict[str, Any] = {
    "prompt": [[1, 2], [3]],
    "structured_outputs": {"choice": ["a"]},
    "stop_token_ids": [1],
    "logprobs": 1,
    "best_of": 2,
}
MESSAGES: dict[str, Any] = {
    "max_tokens": 3,
    "system": [{"type": "text", "text": "s", "cache_control": MARK}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a", "cache_control": MARK},
                {
                    "type": "document",
                    "title": "t",
                    "citations": {"enabled": True},
                    "source": {"type": "text", "media_type": "text/plain", "data": "d"},
                },
                {
                    "type": "document",
                    "source": {"type": "content", "content": [{"type": "text", "text": "z"}]},
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "tool_use", "id": "i", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "i",
                    "is_error": True,
                    "content": [{"type": "text", "text": "r"}, {"type": "image", "source": IMAGE}],
                }
            ],
        },
    ],
    "tools": [
        {"name": "f", "input_schema": SCHEMA, "cache_control": MARK},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 3},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["a"],
}
RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "content": [{"type": "reasoning_text", "text": "t"}],
            "encrypted_content": "mlx_paged:x",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "r"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "o"}, {"type": "input_image"}],
        },
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "z"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "o"},
        {"type": "shell_call", "call_id": "s", "action": {"type": "exec"}},
        {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "a"}]},
        {"type": "web_search_call", "id": "w"},
    ],
    "instructions": "i",
    "tools": [
        {"type": "function", **FUNCTION},
        {
            "type": "custom",
            "name": "g",
            "format": {"type": "grammar", "syntax": "regex", "definition": "a/b"},
        },
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        {"type": "web_search"},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}],
    },
    "text": {"format": JSON_SCHEMA, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
BODIES = {"chat": CHAT, "texts": TEXTS, "messages": MESSAGES, "responses": RESPONSES}
OTHERS: tuple[Any, ...] = (None, True, 5, 0.5, "", "a", [], {}, [5], ["a"], [[]], {"type": 5})


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Each list or object within `node`, with each index or key of it."""
    for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key
        if isinstance(child, dict | list):
            yield from places(child)


def types(node: Any) -> set[str]:
    """The types of objects within `node`."""
    return {owner[key] for owner, key in places(node) if key == "type"}


def take(api: str, body: dict[str, Any]) -> None:
    """Read a body as the server does, and begin its answer."""
    chat = body
    if api == "messages":
        chat = messages.as_chat(body, counts=False)
    if api == "responses":
        chat = responses.as_chat(body)
    request_body.read(chat, api != "texts", 16)
    if api == "messages":
        cache_marks.breakpoints(body)
    if api == "responses":
        items = responses.Items(body)
        assert b"".join([*items.begin(), *items.end(True, {})])


@pytest.mark.parametrize("api", BODIES)
def test_a_part_in_the_place_of_another_one_is_read_or_refused(api):
    take(api, deepcopy(BODIES[api]))  # as it is it is good
    count, num_read = len(list(places(BODIES[api]))), 0
    for i in range(count):
        node, key = list(places(BODIES[api]))[i]
        own = node[key]
        given = [*OTHERS, *types(BODIES[api]), [own], *(own if isinstance(own, list) else ())]
        for value in given:
            body = deepcopy(BODIES[api])
            node, key = list(places(body))[i]
            node[key] = deepcopy(value)
            try:
                take(api, body)
                num_read += 1
            except (ValueError, Refusal):
                pass
    assert num_read > count
