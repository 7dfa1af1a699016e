"""Nemotron's list of calls: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.nemotron import Nemotron
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

MARKS = ("<TOOLCALL>", "</TOOLCALL>")
START, END = map(Mark, MARKS)
F, G = '{"name": "f", "arguments": {"x":  "1"}}', '{"name": "g", "arguments": {}}'


def as_text(*parts):
    return [Text("".join(parts))]


def wrapped(*calls):
    """As the template of Nemotron Nano 2 writes calls."""
    return [START, f"[{', '.join(calls)}]", END]


CALL_F, CALL_G = Call("f", '{"x":  "1"}'), Call("g", "{}")
CASES = [
    Case("a call", ["So: ", *wrapped(F)], [Text("So: "), CALL_F]),
    Case("two calls", wrapped(F, G), [CALL_F, CALL_G]),
    Case(
        "behind a thought",
        ["<think>a</think>\n\n", *wrapped(G)],
        [Thought("a"), CALL_G],
        {"vocabularies": ((),)},
    ),
    Case("one object", [START, F, END], [CALL_F]),
    Case("no call in the list", wrapped(), as_text(*wrapped())),
    Case("no arguments object", wrapped('{"name": "f", "arguments": [1]}'), None),
    Case("a name with a space", wrapped('{"name": "f g", "arguments": {}}'), None),
    Case("no JSON", wrapped('{"name": "f", "arguments": {"x": NaN}}'), None),
    Case(
        "arguments as text",
        wrapped('{"name": "f", "arguments": "{\\"x\\": \\"1\\"}"}'),
        [Call("f", '{"x": "1"}')],
    ),
    Case(
        "the tags in a string",
        wrapped('{"name": "f", "arguments": {"x": "]</TOOLCALL>"}}'),
        [Call("f", '{"x": "]</TOOLCALL>"}')],
    ),
    Case("cut in a call", [START, f"[{F[:30]}"], as_text(START, f"[{F[:30]}"), {"is_cut": True}),
    Case("no end tag at the end", [START, f"[{F}]"], [CALL_F]),
    Case("no end tag, cut", [START, f"[{F}]"], as_text(START, f"[{F}]"), {"is_cut": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    if case.expected is None:
        case = case._replace(expected=as_text(*case.parts))
    check_case(Nemotron, MARKS, case)


def render(calls, rng):
    objects = [
        f'{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
        for name, arguments in calls
    ]
    return [wrapped(*objects)]


def test_random_calls_come_back():
    check_round_trips(Nemotron, MARKS, render, quotes=("</TOOLCALL>", "<TOOLCALL>["), rounds=200)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Nemotron, MARKS)
