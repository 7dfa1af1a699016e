"""Writes calls as the templates of Gemma do, after their documentation, and has cases of them."""

import json

from mlx_paged.formats.events import Call, Text
from tests.support.formats.harness import Case, Mark


def gemma_value(value, quote):
    """The parts of a value: strings between marks, keys without quotes."""
    if isinstance(value, str):
        return [quote, value, quote]
    if isinstance(value, dict):
        parts = ["{"]
        for key in sorted(value, key=str.lower):
            parts += ["," if len(parts) > 1 else "", f"{key}:", *gemma_value(value[key], quote)]
        return [*parts, "}"]
    if isinstance(value, list):
        parts = ["["]
        for each in value:
            parts += ["," if len(parts) > 1 else "", *gemma_value(each, quote)]
        return [*parts, "]"]
    return ["None" if value is None else json.dumps(value)]


def gemma_call(name, arguments, start, end, quote):
    return [start, f"call:{name}", *gemma_value(arguments, quote), end]


def gemma_render(start, end, quote):
    """A renderer of random calls."""
    marks = Mark(start), Mark(end), Mark(quote)

    def render(calls, rng):
        return [gemma_call(*call, *marks) for call in calls]

    return render


def gemma_cases(marks):
    """Cases of a format with these marks: before and behind a call, and around a string."""
    start, end, quote = map(Mark, marks)
    said = [quote, "  a\n}", quote]

    def call(*parts):
        return [start, "call:f{", *parts, "}", end]

    def value(written, expected):
        return Case(written, call(f"x:{written}"), [Call("f", f'{{"x": {expected}}}')])

    def text(*parts):
        return Case("".join(parts), list(parts), [Text("".join(parts))])

    return [
        Case("a string", ["a", *call("x:", *said)], [Text("a"), Call("f", '{"x": "  a\\n}"}')]),
        Case(
            "two calls",
            [*call("n:2"), start, "call:g{}", end],
            [Call("f", '{"n": 2}'), Call("g", "{}")],
        ),
        Case("one wrapper", [start, "call:f{}call:g{}", end], [Call("f", "{}"), Call("g", "{}")]),
        Case("no end", call("n:2")[:-1], [Call("f", '{"n": 2}')]),
        value("10000000000000000000000000", "10000000000000000000000000"),
        value("1.50", "1.50"),
        value("None", "null"),
        value("true", "true"),
        value("12:00", '"12:00"'),
        value("Paris", '"Paris"'),
        value("NaN", '"NaN"'),
        value('"a"', '"a"'),
        value("{a:[1,{}],b:{}}", '{"a": [1, {}], "b": {}}'),
        value('{"a": [ ]}', '{"a": []}'),
        Case(
            "marks in a string",
            call("x:", quote, str(end), quote),
            [Call("f", '{"x": ' + f'"{end}"'.replace('|"|', '|\\"|') + "}")],
        ),
        text(start, "call:f g{}", end),
        text(start, "f{}", end),
        text(start, "call:f{x}", end),
        text(start, "call:f{x:1,x:2}", end),
        text(start, "call:f{x:}", end),
        Case(
            "cut", call("x:", *said)[:4], [Text("".join(call("x:", *said)[:4]))], {"is_cut": True}
        ),
    ]
