"""Prompts from a JSONL file: one request a line. Knows no mlx."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

ALIASES = {"temp": "temperature"}

NUMBERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
)
"""Keys of a line that set a number among the fields of SamplingParams."""

KEYS = (*NUMBERS, *ALIASES, "stop", "logit_bias", "n", "priority")


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """What one line, or one --prompt, asks for.

    Attributes:
        prompt: text, or None if `messages` are given.
        messages: a chat for the model's template.
        options: fields of SamplingParams that differ from the command line's.
        source: where it came from, for error messages.
        id: the line's own "id", given back with the result.
        n: completions wanted; None: as many as the command line says.
        priority: lower numbers first, under that policy.
    """

    prompt: str | None
    messages: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    source: str = "--prompt"
    id: Any = None
    n: int | None = None
    priority: int = 0

    @property
    def title(self) -> str:
        """The prompt, or the last message, on one line."""
        text = self.prompt if self.messages is None else str(self.messages[-1].get("content", ""))
        return " ".join((text or "").split())


def read_prompts(lines: Iterable[str], name: str) -> list[PromptSpec]:
    """Parse JSONL; blank lines are skipped.

    Raises:
        ValueError: naming the file, the line number and what is wrong there.
    """
    specs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        source = f"{name} line {number}"
        try:
            specs.append(_parse(json.loads(line), source))
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}: not valid JSON: {error.msg}") from None
        except RecursionError:
            raise ValueError(f"{source}: not valid JSON: nested too deep") from None
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    if not specs:
        raise ValueError(f"{name}: no prompts in it")
    return specs


def _parse(entry: Any, source: str) -> PromptSpec:
    if not isinstance(entry, dict):
        raise ValueError('expected an object such as {"prompt": "..."}')
    entry = dict(entry)
    prompt, messages = entry.pop("prompt", None), entry.pop("messages", None)
    request_id = entry.pop("id", None)
    if (prompt is None) == (messages is None):
        raise ValueError('expected exactly one of "prompt" and "messages"')
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError('"prompt" must be a string')
    if messages is not None and not _is_chat(messages):
        raise ValueError('"messages" must be a list of {"role": ..., "content": ...}')
    unknown = sorted(entry.keys() - set(KEYS))
    if unknown:
        raise ValueError(f'unknown key "{unknown[0]}": expected one of {", ".join(KEYS)}')
    n, priority = (_whole(entry, key) for key in ("n", "priority"))
    options = {ALIASES.get(key, key): _option(key, value) for key, value in entry.items()}
    return PromptSpec(prompt, messages, options, source, request_id, n, priority or 0)


def _whole(entry: dict[str, Any], key: str) -> int | None:
    """Take a whole number out of the line."""
    value = entry.pop(key, None)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f'"{key}" must be a whole number')
    if key == "n" and value is not None and value < 1:
        raise ValueError('"n" must be at least 1')
    return value


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
    )


def _option(key: str, value: Any) -> Any:
    if key == "stop":
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
            raise ValueError('"stop" must be a string or a list of strings')
        return tuple(strings)
    if key == "logit_bias":
        return _logit_bias(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f'"{key}" must be a number')
    return value


def _logit_bias(value: Any) -> dict[int, float]:
    """JSON has no integer keys: {"42": -1.5} stands for token 42."""
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError('"logit_bias" must be an object such as {"42": -1.5}') from None
