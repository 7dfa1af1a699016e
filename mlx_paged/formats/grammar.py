"""Grammars of calls for llguidance, in its form of Lark."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_paged.formats.marks import Marks, is_token, quoted
from mlx_paged.formats.schemas import choices_of, resolved, types_of
from mlx_paged.sampling_params import JSON_STYLE

EMPTY = {"type": "object", "properties": {}}
"""The schema of a function that declares no parameters."""

ANY_TEXT = r"/(.|\n)*/"
SPACE = r"/\s{0,4}/"  # between a thought and the content


class Function(NamedTuple):
    """A function that a grammar lets the model call."""

    name: str
    schema: Any  # of its arguments


def json_rule(schema: Any) -> str:
    """A JSON schema inside a grammar."""
    schema = EMPTY if schema is None or schema == {} else schema
    schema = {"x-guidance": JSON_STYLE} | schema if isinstance(schema, dict) else schema
    return f"%json {json.dumps(schema)}"


class Shape(NamedTuple):
    """How a format with tags around plain values writes calls, in coded text.

    Attributes:
        wrapper: the texts before the first function and behind the last one.
        function: the texts around the name of a function, before its arguments.
        function_end: the text behind its arguments.
        parameter: the texts around the key of a parameter, before its value.
        parameter_end: the text behind a value. If it begins with a token, or has none, then text is
            read up to it.
        between: the text between two calls.
        is_shared: several functions have one wrapper; else each has its own.
    """

    wrapper: tuple[str, str]
    function: tuple[str, str]
    function_end: str
    parameter: tuple[str, str]
    parameter_end: str
    between: str = "\n"
    is_shared: bool = False


def tagged_rules(
    marks: Marks, shape: Shape, functions: Sequence[Function], several: bool
) -> list[str]:
    """Rules of calls with tags, of which ``calls`` is the first. Text is free where a parameter
    may be a string; other values are JSON that follows the schema. Parameters come in the order in
    which they are declared."""
    start, end = map(marks.lark, shape.wrapper)
    between = marks.lark(shape.between)
    each = "function" if shape.is_shared else "call"
    more = f"({between} {each})*" if several else ""
    calls = f"{start} {each} {more} {end}" if shape.is_shared else f"{each} {more}"
    named = " | ".join(f"function_{i}" for i in range(len(functions)))
    rules = [f"calls: {calls}", f"call: {start} function {end}", f"function: {named}"]
    if shape.is_shared:
        del rules[1]
    for i, function in enumerate(functions):
        rules += _function(marks, shape, f"function_{i}", function)
    return rules


def _function(marks: Marks, shape: Shape, rule: str, function: Function) -> list[str]:
    schema = resolved(function.schema, function.schema)
    schema = schema if isinstance(schema, dict) else {}
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    parts, rules = list[str](), list[str]()
    for j, (key, own) in enumerate(properties.items()):
        name = f"{rule}_{j}"
        parts.append(name if isinstance(required, list) and key in required else f"{name}?")
        rules.append(
            f"{name}: {marks.lark(shape.parameter[0] + key + shape.parameter[1])} {name}_v"
        )
        rules.append(_value(marks, shape, f"{name}_v", own, schema))
    begin = marks.lark(shape.function[0] + function.name + shape.function[1])
    return [f"{rule}: {begin} {' '.join(parts)} {marks.lark(shape.function_end)}", *rules]


def _value(marks: Marks, shape: Shape, rule: str, schema: Any, root: dict[str, Any]) -> str:
    """The rule of a value and of the text behind it."""
    end = marks.lark(shape.parameter_end)
    types, choices = types_of(schema, root), choices_of(schema, root)
    if choices and all(isinstance(choice, str) for choice in choices):
        return f"{rule}: ({' | '.join(map(quoted, choices))}) {end}"
    if types is not None and "string" not in types:
        inner = schema if isinstance(schema, dict) else {}
        inner = {name: root[name] for name in ("$defs", "definitions") if name in root} | inner
        return f"{rule}: {json_rule(inner)} {end}"
    if is_token(shape.parameter_end[:1]):
        return f"{rule}: {ANY_TEXT} {end}"
    return f"{rule}[suffix={quoted(shape.parameter_end)}]: {ANY_TEXT}"
