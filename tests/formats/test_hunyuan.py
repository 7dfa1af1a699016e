"""Hunyuan's lists: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.hunyuan import Hunyuan
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

MARKS = ("<tool_calls>", "</tool_calls>")
START, END = map(Mark, MARKS)
F, G = '{"name": "f", "arguments": {"x":  "1"}}', '{"name": "g", "arguments": {}}'
CALLS = [Call("f", '{"x":  "1"}'), Call("g", "{}")]
QUOTED = '{"x": "</tool_calls>"}'
CASES = [
    Case("two calls", [START, f"[{F}, {G}]", END], CALLS),
    Case(
        "after a thought",
        ["<think>\na\n</think>", "\n", START, f"[{F}]", END],
        [Thought("\na\n"), CALLS[0]],
    ),
    Case("no end", [START, f"[{F}]"], CALLS[:1]),
    Case(
        "marks in a string",
        [START, f'[{{"name": "f", "arguments": {QUOTED}}}]', END],
        [Call("f", QUOTED)],
    ),
    Case("another end", [START, f"[{F}]", "]"], [CALLS[0], Text("]]")]),
    Case("cut", [START, f"[{F[:20]}"], [Text(f"{START}[{F[:20]}")], {"is_cut": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Hunyuan, MARKS, case)


def render(calls, rng):
    """As the template of Hunyuan A13B writes calls."""
    each = ", ".join(
        f'{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
        for name, arguments in calls
    )
    return [[START, f"[{each}]", END]]


def test_random_calls_come_back():
    check_round_trips(Hunyuan, MARKS, render, quotes=MARKS, rounds=200, shares=True)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Hunyuan, MARKS)
