"""Grammars of calls for llguidance, in its form of Lark."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mlx_paged.formats.flattened import flattened
from mlx_paged.formats.marks import Marks, is_token, quoted
from mlx_paged.formats.schemas import choices_of, resolved, types_of
from mlx_paged.sampling_params import JSON_STYLE

EMPTY = {"type": "object", "properties": {}}
"""The schema of a function that declares no parameters."""

ANY_TEXT = r"/(.|\n)*/"
SPACE = r"/\s{0,4}/"  # between a thought and the content


TEXT_GRAMMAR = "x-lark"
"""The keyword of a string's schema that has the grammar of the string's text."""


class Function(NamedTuple):
    """A function that a grammar lets the model call."""

    name: str
    schema: Any  # of its arguments


def json_rule(schema: Any) -> str:
    """A JSON schema inside a grammar. Raises ValueError if the schema, or one of a property, has a
    grammar of a text that is no expression."""
    schema = EMPTY if schema is None or schema == {} else schema
    if isinstance(schema, dict):
        schema = {"x-guidance": JSON_STYLE} | _with_pattern(schema)
        properties, _ = declared(schema)
        if properties:
            schema["properties"] = {key: _with_pattern(own) for key, own in properties.items()}
    return f"%json {json.dumps(schema)}"


def _with_pattern(schema: Any) -> Any:
    """A schema with an expression in the place of the grammar of its text."""
    lark = text_grammar(schema)
    if lark is None:
        return schema
    try:
        pattern = f"^{flattened(lark)}$"
    except ValueError as error:
        raise ValueError(
            "tools: expected a grammar that is one expression, for this model writes its calls"
            f" in JSON, but {error}"
        ) from error
    return {name: x for name, x in schema.items() if name != TEXT_GRAMMAR} | {"pattern": pattern}


def text_grammar(schema: Any) -> str | None:
    """The grammar of the texts of a string's schema, if it has one."""
    lark = schema.get(TEXT_GRAMMAR) if isinstance(schema, dict) else None
    return lark if isinstance(lark, str) and schema.get("type") == "string" else None


def _nested(rule: str, lark: str) -> str:
    """A rule of the texts of a grammar."""
    return f"{rule}: %lark {{\n{lark}\n}}"


class Shape(NamedTuple):
    """How a format with tags around plain values writes calls, in coded text.

    Attributes:
        wrapper: the texts before the first function and after the last one.
        function: the texts around the name of a function, before its arguments.
        function_end: the text after its arguments.
        parameter: the texts around the key of a parameter, before its value.
        parameter_end: the text after a value, up to which text is read.
        between: the text between two calls.
        is_shared: several functions have one wrapper; else each has its own.
        text: the texts after the key and after the value of a text; None: those of all values.
        is_told: the text after the key tells whether the value is a text.
    """

    wrapper: tuple[str, str]
    function: tuple[str, str]
    function_end: str
    parameter: tuple[str, str]
    parameter_end: str
    between: str = "\n"
    is_shared: bool = False
    text: tuple[str, str] | None = None
    is_told: bool = False


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
    properties, required = declared(schema)
    parts, rules = list[str](), list[str]()
    for j, (key, own) in enumerate(properties.items()):
        name = f"{rule}_{j}"
        parts.append(name if key in required else f"{name}?")
        rules += _parameter(marks, shape, name, shape.parameter[0] + key, own, schema)
    begin = marks.lark(shape.function[0] + function.name + shape.function[1])
    return [f"{rule}: {begin} {' '.join(parts)} {marks.lark(shape.function_end)}", *rules]


def declared(schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The properties of an object's schema, and the names of those that are required."""
    properties, required = schema.get("properties"), schema.get("required")
    return (
        properties if isinstance(properties, dict) else {},
        required if isinstance(required, list) else [],
    )


def _parameter(
    marks: Marks, shape: Shape, rule: str, begin: str, schema: Any, root: dict[str, Any]
) -> list[str]:
    """The rules of a parameter, whose tag begins with `begin`. What may be a text or another
    value is the text, unless the format tells them apart."""
    types, choices = types_of(schema, root), choices_of(schema, root)
    after_key, end = shape.text or (shape.parameter[1], shape.parameter_end)
    rules, ways = list[str](), list[str]()
    if types is None or "string" in types:
        ways.append(f"{marks.lark(begin + after_key)} {rule}_t")
        rules += _text(marks, f"{rule}_t", choices or [], end, text_grammar(schema))
    if types and (not ways or (shape.is_told and len(types) > 1)):
        inner = schema if isinstance(schema, dict) else {}
        inner = {name: root[name] for name in ("$defs", "definitions") if name in root} | inner
        ways.append(f"{marks.lark(begin + shape.parameter[1])} {rule}_v")
        rules.append(f"{rule}_v: {json_rule(inner)} {marks.lark(shape.parameter_end)}")
    return [f"{rule}: {' | '.join(ways)}", *rules]


def _text(marks: Marks, rule: str, choices: Sequence[Any], end: str, lark: str | None) -> list[str]:
    """The rules of a text and of the `end` after it. The text follows the grammar `lark`. If
    that is None, the text is one of `choices`, provided all of them are strings, or else any."""
    if lark is not None:
        return [f"{rule}: {rule}_g {marks.lark(end)}", _nested(f"{rule}_g", lark)]
    if choices and all(isinstance(choice, str) for choice in choices):
        return [f"{rule}: ({' | '.join(map(quoted, choices))}) {marks.lark(end)}"]
    before = next((i for i, character in enumerate(end) if is_token(character)), len(end))
    if before == 0:
        return [f"{rule}: {ANY_TEXT} {marks.lark(end)}"]
    part = f"[suffix={quoted(end[:before])}]: {ANY_TEXT}"
    if before == len(end):
        return [f"{rule}{part}"]
    return [f"{rule}: {rule}_part+ {marks.lark(end[before:])}", f"{rule}_part{part}"]


def literal_rules(
    functions: Sequence[Function],
    several: bool,
    around: tuple[str, str, str, str],
    written: Callable[[str], tuple[str, str | None]],
) -> list[str]:
    """Rules of calls with arguments between commas, of which ``calls`` is the first. Arguments come
    in the order in which they are declared.

    Args:
        around: see :meth:`Literals.call_rules`.
        written: see :meth:`Literals.written_values`.
    """
    calls, before, after, end = around
    rules = [f"calls: {calls}"]
    rules.append("function: " + " | ".join(f"function_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        rule, schema = f"function_{i}", resolved(function.schema, function.schema)
        schema = schema if isinstance(schema, dict) else {}
        properties, required = declared(schema)
        head = f"{before} {quoted(function.name)} {after}"
        rules.append(f"{rule}: {head} {rule}_first_0 {end}")
        for j, (key, own) in enumerate(properties.items()):
            text, mark = written(key)
            rules.append(f"{rule}_{j}: {text} {rule}_{j}_v")
            rules.append(_literal(f"{rule}_{j}_v", own, schema, mark))
            for name, comma in (("first", ""), ("more", '", "')):
                without = "" if key in required else f"| {rule}_{name}_{j + 1}"
                rules.append(f"{rule}_{name}_{j}: {comma} {rule}_{j} {rule}_more_{j + 1} {without}")
        rules += [f'{rule}_{name}_{len(properties)}: ""' for name in ("more", "first")]
    return rules


def _literal(rule: str, schema: Any, root: dict[str, Any], mark: str | None) -> str:
    """The rule of a value. `mark` is around a string, in a grammar's form; None: it is JSON."""
    types, choices = types_of(schema, root), choices_of(schema, root)
    if mark is None or (types is not None and "string" not in types):
        inner = schema if isinstance(schema, dict) else {}
        inner = {name: root[name] for name in ("$defs", "definitions") if name in root} | inner
        return f"{rule}: {json_rule(inner)}"
    if choices and all(isinstance(choice, str) for choice in choices):
        return f"{rule}: {mark} ({' | '.join(map(quoted, choices))}) {mark}"
    if (lark := text_grammar(schema)) is not None:
        return f"{rule}: {mark} {rule}_g {mark}\n{_nested(f'{rule}_g', lark)}"
    if mark.startswith("<["):
        return f"{rule}: {mark} {ANY_TEXT} {mark}"
    return f"{rule}: {mark} {rule}_t\n{rule}_t[suffix={mark}]: {ANY_TEXT}"
