"""Mistral's marks: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.mistral import Mistral
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
START, ARGS, ID, THINK, THOUGHT = map(Mark, MARKS)
OLD = '[{"name": "f", "arguments": {"x": "1"}, "id": "abc"}, {"name": "g", "arguments": {}}]'
CASES = [
    Case("a call", ["a", START, "f", ARGS, '{"x":  "1"}'], [Text("a"), Call("f", '{"x":  "1"}')]),
    Case(
        "two calls",
        [START, "f", ARGS, "{}", START, "g", ARGS, "{}"],
        [Call("f", "{}"), Call("g", "{}")],
    ),
    Case(
        "two calls, one mark",
        [START, "f", ARGS, "{}", "g", ARGS, "{}"],
        [Call("f", "{}"), Call("g", "{}")],
    ),
    Case("an id", [START, "f", ID, "a1b2", ARGS, "{}"], [Call("f", "{}", "a1b2")]),
    Case("a list", [START, " ", OLD], [Call("f", '{"x": "1"}', "abc"), Call("g", "{}")]),
    Case(
        "marks in a string",
        [START, "f", ARGS, '{"x": "[TOOL_CALLS]g[ARGS]{}"}'],
        [Call("f", '{"x": "[TOOL_CALLS]g[ARGS]{}"}')],
    ),
    Case(
        "text after a call",
        [START, "f", ARGS, "{}", " so it is"],
        [Call("f", "{}"), Text(" so it is")],
    ),
    Case(
        "cut",
        [START, "f", ARGS, "{}", START, "g", ARGS, '{"y": 1'],
        [Call("f", "{}"), Text('[TOOL_CALLS]g[ARGS]{"y": 1')],
        {"is_cut": True},
    ),
    Case("cut after a whole call", [START, "f", ARGS, "{}"], [Call("f", "{}")], {"is_cut": True}),
    Case("no object", [START, "f", ARGS, "[]"], [Text("[TOOL_CALLS]f[ARGS][]")]),
    Case("a name with a space", [START, "f g", ARGS, "{}"], [Text("[TOOL_CALLS]f g[ARGS]{}")]),
    Case("a thought", [THINK, "a", THOUGHT, "b"], [Thought("a"), Text("b")], {"style": "mistral"}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Mistral, MARKS, case)


def render_new(calls, rng):
    """As the templates of Mistral Small 3.2 and later write calls."""
    return [[START, name, ARGS, json.dumps(arguments)] for name, arguments in calls]


def render_old(calls, rng):
    """As the templates before write calls."""
    each = [{"name": n, "arguments": a, "id": f"call0000{i}"} for i, (n, a) in enumerate(calls)]
    return [[START, " ", json.dumps(each, ensure_ascii=False)]]


@pytest.mark.parametrize("render", [render_new, render_old])
def test_random_calls_come_back(render):
    check_round_trips(Mistral, MARKS, render, quotes=MARKS, rounds=200)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Mistral, MARKS)
