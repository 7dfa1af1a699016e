"""Kimi K2's section of calls: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.kimi_k2 import KimiK2
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

NAMES = (
    *("tool_calls_section_begin", "tool_call_begin", "tool_call_argument_begin"),
    *("tool_call_end", "tool_calls_section_end"),
)
MARKS = tuple(f"<|{name}|>" for name in NAMES)
START, BEGIN, ARGUMENT, END_CALL, END = map(Mark, MARKS)


def call(own_id, arguments):
    return [BEGIN, own_id, ARGUMENT, arguments, END_CALL]


BOTH = [START, *call("functions.f:0", '{"x":  "1"}'), *call("functions.g:1", "{}"), END]
CALLS = [Call("f", '{"x":  "1"}', "functions.f:0"), Call("g", "{}", "functions.g:1")]
QUOTED = '{"x": "<|tool_call_end|>"}'


def one(own_id, arguments):
    return [START, *call(own_id, arguments), END]


def as_text(*parts):
    return [Text("".join(parts))]


CASES = [
    Case("two calls", ["a", *BOTH], [Text("a"), *CALLS]),
    Case(
        "a name with dots", one("functions.a.b:12", "{}"), [Call("a.b", "{}", "functions.a.b:12")]
    ),
    Case("marks in a string", one("f:0", QUOTED), [Call("f", QUOTED, "f:0")]),
    Case("cut in the second call", BOTH[:10], [CALLS[0], *as_text(*BOTH[6:10])], {"is_cut": True}),
    Case("no section's end at the end", BOTH[:-1], CALLS),
    Case("no object", one("f:0", "[]"), as_text(*one("f:0", "[]"))),
    Case("a name with a space", one("f g:0", "{}"), as_text(*one("f g:0", "{}"))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(KimiK2, MARKS, case)


def render(calls, rng):
    """As the template of Kimi K2 writes calls."""
    parts = [START]
    for i, (name, arguments) in enumerate(calls):
        parts += call(f"functions.{name}:{i}", json.dumps(arguments, ensure_ascii=False))
    return [[*parts, END]]


def test_random_calls_come_back():
    check_round_trips(KimiK2, MARKS, render, quotes=MARKS, rounds=300, shares=True)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(KimiK2, MARKS)
