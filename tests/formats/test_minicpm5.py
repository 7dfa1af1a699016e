"""MiniCPM5's XML: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.minicpm5 import MiniCpm5
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips, function

MARKS = ("<function", "</function>", "<param", "</param>")
START, END, PARAM, PARAM_END = map(Mark, MARKS)


def call(name, /, **arguments):
    """As the template of MiniCPM5 asks for a call: a text with marks or lines is a section."""
    parts = [START, f' name="{name}">']
    for key, value in arguments.items():
        is_plain = not any(mark in value for mark in "<&\n")
        text = value if is_plain else f"<![CDATA[{value}]]>"
        parts += [PARAM, f' name="{key}">', text, PARAM_END]
    return [*parts, END]


def as_text(*parts):
    return [Text("".join(parts))]


CODE = "first line\nsecond <line> & more\n"
QUOTED = "a</param></function>]]></param>b"
CASES = [
    Case(
        "a call",
        ["So:\n", *call("f", x=CODE, n="2")],
        [Text("So:\n"), Call("f", json.dumps({"x": CODE, "n": 2}))],
    ),
    Case("no arguments", call("f"), [Call("f", "{}")]),
    Case("white space of a text", call("f", x="  a "), [Call("f", '{"x": "  a "}')]),
    Case("an empty text", call("f", x=""), [Call("f", '{"x": ""}')]),
    Case("two calls", [*call("f", x="1"), *call("g")], [Call("f", '{"x": "1"}'), Call("g", "{}")]),
    Case(
        "other quotation marks",
        [START, " name='f'>\n", PARAM, " name='x'>1", PARAM_END, "\n", END],
        [Call("f", '{"x": "1"}')],
    ),
    Case(
        "behind a thought",
        ["<think>\na\n</think>\n\n", *call("g", y="b")],
        [Thought("\na\n"), Call("g", '{"y": "b"}')],
        {"vocabularies": ((),)},
    ),
    Case("tags in a text", call("f", x=QUOTED), [Call("f", json.dumps({"x": QUOTED}))]),
    Case(
        "a large integer",
        call("f", n="12345678901234567890"),
        [Call("f", '{"n": 12345678901234567890}')],
    ),
    Case(
        "null",
        call("f", x="null"),
        [Call("f", '{"x": null}')],
        {"tools": [function("f", x={"type": ["string", "null"]})]},
    ),
    Case("a name with a space", call("f g"), as_text(*call("f g"))),
    Case("no name", [START, ">", END], as_text(START, ">", END)),
    Case("cut", call("f", x=CODE)[:5], as_text(*call("f", x=CODE)[:5]), {"is_cut": True}),
    Case("marks as text", "".join(call("f")), as_text(*call("f")), {"vocabularies": (MARKS,)}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(MiniCpm5, MARKS, case)


def render(calls, rng):
    wrappers = []
    for name, arguments in calls:
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        wrappers.append([*(["\n"] if rng.random() < 0.5 else []), *call(name, **texts)])
    return wrappers


def test_random_calls_come_back():
    quotes = ("</param>", "]]>", '<param name="zz">', "</function>", "<![CDATA[")
    check_round_trips(MiniCpm5, MARKS, render, quotes=quotes, rounds=200)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(MiniCpm5, MARKS, ends=["</param>", "]]></param>"])
