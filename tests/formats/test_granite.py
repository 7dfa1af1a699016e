"""Granite's lists: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.granite import Granite
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

MARKS = ("<|tool_call|>", "<function_call>")
START, FUNCTION = map(Mark, MARKS)
F, G = '{"name": "f", "arguments": {"x":  "1"}}', '{"name": "g", "arguments": {}}'
CALLS = [Call("f", '{"x":  "1"}'), Call("g", "{}")]
CASES = [
    Case("a list", ["a", START, f"[{F}, {G}]"], [Text("a"), *CALLS]),
    Case("white space", [START, f"\n[\n{F} ,\n{G}]\n"], CALLS),
    Case("Granite 20B", [FUNCTION, f" {F}", FUNCTION, f" {G}"], CALLS),
    Case("text behind", [START, f"[{F}]", " so"], [CALLS[0], Text(" so")]),
    Case("cut", [START, F[:20]], [Text(START + F[:20])], {"is_cut": True}),
    Case(
        "cut in a list", [START, f"[{F}, {G[:9]}"], [CALLS[0], Text(f", {G[:9]}")], {"is_cut": True}
    ),
    Case("no comma", [START, f"[{F} {G}]"], [CALLS[0], Text(f" {G}]")]),
    Case("an empty list", [START, "[]"], [Text(START + "[]")]),
    Case("numbers in a list", [START, "[1]"], [Text(START + "[1]")]),
    Case(
        "arguments that are a list",
        [START, '[{"name": "f", "arguments": [1]}]'],
        [Text(START + '[{"name": "f", "arguments": [1]}]')],
    ),
    Case(
        "NaN",
        [START, '[{"name": "f", "arguments": {"n": NaN}}]'],
        [Text(START + '[{"name": "f", "arguments": {"n": NaN}}]')],
    ),
    Case("no tools", [START, f"[{F}]"], [Text(START + f"[{F}]")], {"tools": ()}),
    Case(
        "a name that is not declared",
        [START, '[{"name": "h", "arguments": {"n": 1}}]'],
        [Call("h", '{"n": 1}')],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Granite, MARKS, case)


def test_a_text_like_the_token_is_text():
    check_case(
        Granite,
        MARKS,
        Case(
            "text", f"<|tool_call|>[{F}]", [Text(f"<|tool_call|>[{F}]")], {"vocabularies": (MARKS,)}
        ),
    )


def render_list(calls, rng):
    """As the template of Granite 3 writes calls."""
    each = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return [[START, json.dumps(each, ensure_ascii=False)]]


def render_each(calls, rng):
    """As the model card of Granite 20B writes calls."""
    each = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return [[FUNCTION, " ", json.dumps(one, indent=rng.choice((None, 2)))] for one in each]


@pytest.mark.parametrize(("render", "shares"), [(render_list, True), (render_each, False)])
def test_random_calls_come_back(render, shares):
    check_round_trips(Granite, MARKS, render, quotes=MARKS, rounds=200, shares=shares)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Granite, MARKS)
