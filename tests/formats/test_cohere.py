"""Cohere's lists of actions: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.cohere import Cohere
from mlx_paged.formats.events import Call, Text, Thought
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

NAMES = ("ACTION", "THINKING", "RESPONSE", "TEXT")
MARKS = tuple(f"<|{place}_{name}|>" for name in NAMES for place in ("START", "END"))
START, END, THINK, THOUGHT, RESPONSE, RESPONSE_END, TEXT, TEXT_END = map(Mark, MARKS)
F = '{"tool_call_id": "0", "tool_name": "f", "parameters": {"x":  "1"}}'
G = '{"tool_call_id": "1", "tool_name": "g", "parameters": {}}'
CALLS = [Call("f", '{"x":  "1"}'), Call("g", "{}")]
QUOTED = '{"x": "<|END_ACTION|>```"}'
OLD = '[\n    {\n        "tool_name": "f",\n        "parameters": {"x":  "1"}\n    }\n]'
CASES = [
    Case("two actions", [START, f"[\n    {F},\n    {G}\n]", END], CALLS),
    Case(
        "a thought",
        [THINK, "a", THOUGHT, START, f"[{F}]", END],
        [Thought("a"), CALLS[0]],
        {"style": "cohere"},
    ),
    Case("Command R", f"Action: ```json\n{OLD}\n```", CALLS[:1]),
    Case("Command R, no end", f"Action: ```json\n{OLD}", CALLS[:1]),
    Case(
        "marks in a string",
        [START, f'[{{"tool_name": "f", "parameters": {QUOTED}}}]', END],
        [Call("f", QUOTED)],
    ),
    Case(
        "a name with a space",
        [START, '[{"tool_name": "f g", "parameters": {}}]', END],
        [Text(f'{START}[{{"tool_name": "f g", "parameters": {{}}}}]{END}')],
    ),
    Case("no action", "Action: ```json\n[1]\n```", [Text("Action: ```json\n[1]\n```")]),
    Case("cut", [START, f"[{F}, {G[:9]}"], [CALLS[0], Text(f", {G[:9]}")], {"is_cut": True}),
    Case("a response", [RESPONSE, "a", RESPONSE_END], [Text("a")], {"vocabularies": (MARKS,)}),
    Case(
        "text",
        [TEXT, "<|END_TEXT|>b", TEXT_END],
        [Text("<|END_TEXT|>b")],
        {"vocabularies": (MARKS,)},
    ),
    Case(
        "without tools",
        [RESPONSE, "a", RESPONSE_END],
        [Text("a")],
        {"vocabularies": (MARKS,), "tools": ()},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Cohere, MARKS, case)


def render_new(calls, rng):
    """As the template of Command R7B writes calls."""
    each = [
        f'    {{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {json.dumps(values)}}}'
        for i, (name, values) in enumerate(calls)
    ]
    return [[START, "[\n", ",\n".join(each), "\n]", END]]


def render_old(calls, rng):
    """As the template of Command R writes calls."""
    each = [{"tool_name": name, "parameters": arguments} for name, arguments in calls]
    return [["Action: ```json\n", json.dumps(each, indent=4, ensure_ascii=False), "\n```"]]


@pytest.mark.parametrize("render", [render_new, render_old])
def test_random_calls_come_back(render):
    check_round_trips(Cohere, MARKS, render, quotes=(*MARKS, "```"), rounds=200, shares=True)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Cohere, MARKS)
