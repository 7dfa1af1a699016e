"""Phi-4-mini's lists: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.phi4_mini import Phi4Mini
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

MARKS = ("<|tool_call|>", "<|/tool_call|>")
START, END = map(Mark, MARKS)
F, G = '{"name": "f", "arguments": {"x":  "1"}}', '{"name": "g", "arguments": {}}'
CALLS = [Call("f", '{"x":  "1"}'), Call("g", "{}")]
QUOTED = '{"x": "<|/tool_call|> functools[]"}'
CASES = [
    Case("tokens", ["a", START, f"[{F}, {G}]", END], [Text("a"), *CALLS]),
    Case("no end", [START, f"[{F}]"], CALLS[:1]),
    Case("a word", f"functools[{F},\n{G}]", CALLS),
    Case(
        "marks in a string",
        f'functools[{{"name": "f", "arguments": {QUOTED}}}]',
        [Call("f", QUOTED)],
    ),
    Case(
        "a token in a string",
        [START, '[{"name": "f", "arguments": {"x": "', END, '"}}]', END],
        [Call("f", '{"x": "<|/tool_call|>"}')],
    ),
    Case(
        "the word in a text",
        "import functools\nfunctools.cache",
        [Text("import functools\nfunctools.cache")],
    ),
    Case("the word in code", "functools[0]", [Text("functools[0]")]),
    Case("cut", f"functools[{F[:20]}", [Text(f"functools[{F[:20]}")], {"is_cut": True}),
    Case(
        "a name with a space",
        'functools[{"name": "f g", "arguments": {}}]',
        [Text('functools[{"name": "f g", "arguments": {}}]')],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Phi4Mini, MARKS, case)


def render_tokens(calls, rng):
    """As the model card writes calls."""
    each = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return [[START, json.dumps(each, ensure_ascii=False), END]]


def render_word(calls, rng):
    """As the prompt of tools describes calls."""
    each = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return [[f"functools{json.dumps(each, ensure_ascii=False)}"]]


@pytest.mark.parametrize("render", [render_tokens, render_word])
def test_random_calls_come_back(render):
    quotes = (*MARKS, "functools[")
    check_round_trips(Phi4Mini, MARKS, render, quotes=quotes, rounds=200, shares=True)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Phi4Mini, MARKS)
