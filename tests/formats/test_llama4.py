"""Calls of Llama 4: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.llama4 import Llama4
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips
from tests.support.formats.pythons import as_python

MARKS = ("<|python_start|>", "<|python_end|>")
START, END = map(Mark, MARKS)
CALLS = [Call("f", '{"x": "1", "n": 2}'), Call("g", "{}")]
BOTH = '[f(x="1", n=2), g()]'
OBJECT = '{"name": "g", "parameters": {}}'
TOKENS = {"vocabularies": (MARKS,)}
CASES = [
    Case("Python", BOTH, CALLS),
    Case("JSON", OBJECT, CALLS[1:]),
    Case("Python between tokens", [START, BOTH, END], CALLS, TOKENS),
    Case("JSON between tokens", [START, OBJECT, END], CALLS[1:], TOKENS),
    Case("text", "[1] so", [Text("[1] so")]),
    Case("cut", BOTH[:5], [Text(BOTH[:5])], {"is_cut": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Llama4, MARKS, case)


def render_python(calls, rng):
    """As the model card writes calls."""
    return [[f"[{', '.join(as_python(*call) for call in calls)}]"]]


def render_json(calls, rng):
    """As the template writes a call."""
    each = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    return [["; ".join(each)]]


@pytest.mark.parametrize("render", [render_python, render_json])
def test_random_calls_come_back(render):
    check_round_trips(Llama4, MARKS, render, quotes=(*MARKS, "')]"), rounds=200, shares=True)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Llama4, MARKS)
