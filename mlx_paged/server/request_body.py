"""Checks the body of a request and adapts it to mlx-lm's server. Does not import mlx."""

import json
from typing import Any

from mlx_paged.arguments import is_count

Body = dict[str, Any]
IMAGE_PARTS = {"image_url", "input_image", "image"}


def parse(raw: bytes) -> Body:
    """The JSON object in a body, without its null fields.

    Raises:
        ValueError: the body is no JSON object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:  # bad UTF-8 raises a ValueError
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("the body is not a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def adapt(body: Body, is_chat: bool, max_samples: int) -> tuple[Body, int]:
    """The body as mlx-lm's server expects it, and the number of choices.

    Raises:
        ValueError: a field has a wrong type or asks for something that is not supported.
    """
    body = dict(body)
    n = body.pop("n", 1)
    _require(is_count(n, 1) and n <= max_samples, "n", f"an integer from 1 to {max_samples}")
    if is_chat:
        _check_messages(body.get("messages"))
    else:
        _adapt_completion(body)
    stop = body.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    _require(
        isinstance(stop, list) and all(isinstance(s, str) and s for s in stop),
        "stop",
        "a non-empty string or a list of them",
    )
    tools = body.get("tools", [])
    _require(
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools),
        "tools",
        "a list of objects",
    )
    for name in ("stream_options", "chat_template_kwargs", "role_mapping"):
        _require(isinstance(body.get(name, {}), dict), name, "an object")
    for name in ("adapters", "draft_model"):
        _require(body.get(name, "default_model") == "default_model", name, "nothing")
    if "xtc_probability" in body and is_count(body["xtc_probability"]):
        body["xtc_probability"] = float(body["xtc_probability"])
    return body, n


def _adapt_completion(body: Body) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        body["prompt"] = prompt = prompt[0]
    is_tokens = isinstance(prompt, list) and all(map(is_count, prompt))
    _require(isinstance(prompt, str) or is_tokens, "prompt", "a string or a list of token ids")
    logprobs = body.get("logprobs")
    if is_count(logprobs):  # mlx-lm expects a flag and a number
        body["logprobs"], body["top_logprobs"] = True, logprobs


def _check_messages(messages: object) -> None:
    _require(
        isinstance(messages, list) and len(messages) > 0, "messages", "a list that is not empty"
    )
    assert isinstance(messages, list)
    for message in messages:
        _require(
            isinstance(message, dict) and isinstance(message.get("role"), str),
            "messages",
            "objects with a role",
        )
        content = message.get("content", "")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            _require(isinstance(part, dict), "messages", "content parts that are objects")
            _require(part.get("type") not in IMAGE_PARTS, "messages", "no images")
            _require(
                part.get("type") == "text" and isinstance(part.get("text"), str | None),
                "messages",
                "content that is text",
            )


def _require(condition: bool, name: str, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name}: expected {expected}")
