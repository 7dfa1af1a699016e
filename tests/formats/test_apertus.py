"""Apertus' lists: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.apertus import Apertus
from mlx_paged.formats.events import Call, Text, Thought
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

MARKS = ("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>")
START, END, THINK, THOUGHT = map(Mark, MARKS)
BOTH = '[{"f": {"x":  "1"}}, {"g": {}}]'
CALLS = [Call("f", '{"x":  "1"}'), Call("g", "{}")]
QUOTED = '{"x": "<|tools_suffix|>"}'
CASES = [
    Case("two calls", ["a", START, BOTH, END], [Text("a"), *CALLS]),
    Case(
        "a thought",
        [THINK, "b", THOUGHT, START, BOTH, END],
        [Thought("b"), *CALLS],
        {"style": "apertus"},
    ),
    Case("marks in a string", [START, f'[{{"f": {QUOTED}}}]', END], [Call("f", QUOTED)]),
    Case(
        "two keys",
        [START, '[{"f": {}, "g": {}}]', END],
        [Text(START + '[{"f": {}, "g": {}}]' + END)],
    ),
    Case("no object", [START, '[{"f": 1}]', END], [Text(START + '[{"f": 1}]' + END)]),
    Case(
        "a name with a space", [START, '[{"f g": {}}]', END], [Text(START + '[{"f g": {}}]' + END)]
    ),
    Case("cut", [START, BOTH[:22]], [CALLS[0], Text(BOTH[19:22])], {"is_cut": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Apertus, MARKS, case)


def render(calls, rng):
    """As the template of Apertus writes calls."""
    each = ", ".join(
        f'{{"{name}": {json.dumps(arguments, ensure_ascii=False)}}}' for name, arguments in calls
    )
    return [[START, f"[{each}]", END]]


def test_random_calls_come_back():
    check_round_trips(Apertus, MARKS, render, quotes=MARKS, rounds=200, shares=True)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Apertus, MARKS)
