"""Grammars of tool calls, by the format of the model. Imports no mlx."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mlx_paged.sampling_params import JSON_STYLE

Tokenizer = Any
Functions = Sequence[Mapping[str, Any]]

CallGrammar = Callable[[Tokenizer, Functions, bool], str]
"""Makes the grammar, in llguidance's form of Lark, of calls of these functions: of one call, or of
one or more if the last argument says so. It begins at its rule ``start``."""


def format_of(tokenizer: Tokenizer) -> str:
    """The name of the model's format of tool calls, as mlx-lm names its parser."""
    module = getattr(tokenizer.tool_parser, "__module__", None) or "none"
    return module.rpartition(".")[2]


def of_model(tokenizer: Tokenizer) -> CallGrammar | None:
    """What makes the grammar of the model's format; None if no grammar is known of the format."""
    return FORMATS.get(format_of(tokenizer))


def json_rule(schema: Any) -> str:
    """A JSON schema inside a grammar."""
    schema = {"x-guidance": JSON_STYLE} | schema if isinstance(schema, dict) else schema
    return f"%json {json.dumps(schema)}"


def literal(text: str | None, tokens: Sequence[int] | None) -> str:
    """A text as a grammar writes it: by its tokens, if they are known, for they may be special."""
    if not text:
        return ""
    return " ".join(f"<[{token}]>" for token in tokens) if tokens else json.dumps(text)


def _marked_objects(
    before: str, after: str, tokenizer: Tokenizer, functions: Functions, several: bool
) -> str:
    """Each call is a JSON object with "name" and "arguments" between two marks.

    Args:
        before: the text between the first mark and the object.
        after: the text between the object and the last mark.
    """
    start, end = _marks(tokenizer)
    call = f"call: {start} {json.dumps(before)} object {json.dumps(after)} {end}"
    more = '("\\n" call)*' if several else ""
    return "\n".join([f"start: call {more}", call, *_objects(functions)])


def _marked_list(tokenizer: Tokenizer, functions: Functions, several: bool) -> str:
    """All calls are JSON objects in one list, which follows a mark."""
    start, end = _marks(tokenizer)
    more = '(", " object)*' if several else ""
    return "\n".join([f'start: {start} "[" object {more} "]" {end}', *_objects(functions)])


def _marks(tokenizer: Tokenizer) -> tuple[str, str]:
    """What begins and what ends a call."""
    return (
        literal(tokenizer.tool_call_start, tokenizer.tool_call_start_tokens),
        literal(tokenizer.tool_call_end, tokenizer.tool_call_end_tokens),
    )


def _objects(functions: Functions) -> list[str]:
    """The rule ``object``, of a call of one of the functions, and the rules that it needs."""
    rules = ["object: " + " | ".join(f"object_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function["name"])}, "arguments": '
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        rules.append(f'object_{i}: {json.dumps(head)} {json_rule(schema)} "}}"')
    return rules


FORMATS: dict[str, CallGrammar] = {
    "json_tools": partial(_marked_objects, "\n", "\n"),
    "longcat": partial(_marked_objects, "\n", "\n"),
    "mistral": _marked_list,
}
"""By the name of a format: what makes its grammar."""
