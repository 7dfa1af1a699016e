"""LFM2's calls: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.lfm2 import Lfm2
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips
from tests.support.formats.pythons import as_json, as_python, check_raw_strings

MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
START, END = map(Mark, MARKS)
CALLS = [Call("f", '{"x": "1", "n": 2}'), Call("g", "{}")]
QUOTED = "[f(x='<|tool_call_end|>')]"
AS_JSON = '[{"name": "f", "arguments": {"x": "1", "n": 2}}, {"name": "g", "arguments": {}}]'
HALF = "[f(x='1', n=2), g("
CASES = [
    Case("two calls", ["a", START, "[f(x='1', n=2), g()]", END], [Text("a"), *CALLS]),
    Case("text behind", [START, "[g()]", END, " so"], [CALLS[1], Text(" so")]),
    Case("two wrappers", [START, "[f(x='1', n=2)]", END, "\n", START, "[g()]", END], CALLS),
    Case("JSON", [START, AS_JSON, END], CALLS),
    Case("one JSON object", [START, '{"name": "g"}', END], CALLS[1:]),
    Case("marks in a string", [START, QUOTED, END], [Call("f", '{"x": "<|tool_call_end|>"}')]),
    Case("no end", [START, "[g()]"], CALLS[1:]),
    Case("a comma at the end", [START, "[g(),]", END], CALLS[1:]),
    Case("a semicolon", [START, "[g(); g()]", END], [Text(f"{START}[g(); g()]{END}")]),
    Case("no list", [START, "g()", END], [Text(f"{START}g(){END}")]),
    Case("no keyword", [START, "[g('a')]", END], [Text(f"{START}[g('a')]{END}")]),
    Case("quotes in a string", [START, "[f(x='it's')]", END], [Call("f", '{"x": "it\'s"}')]),
    Case("cut", [START, "[g(y='"], [Text(f"{START}[g(y='")], {"is_cut": True}),
    Case("cut in the second call", [START, HALF], [CALLS[0], Text(", g(")], {"is_cut": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Lfm2, MARKS, case)


def render(value):
    def rendered(calls, rng):
        return [[START, f"[{', '.join(as_python(*call, value) for call in calls)}]", END]]

    return rendered


def render_json(calls, rng):
    """As a prompt may ask for calls."""
    each = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return [[START, json.dumps(each, ensure_ascii=False), END]]


@pytest.mark.parametrize("value", [repr, as_json])
def test_random_calls_come_back(value):
    quotes = (*MARKS, ")]<|tool_call_end|>", "', x='")
    check_round_trips(Lfm2, MARKS, render(value), quotes=quotes, rounds=200, shares=True)


def test_random_calls_in_json_come_back():
    check_round_trips(Lfm2, MARKS, render_json, quotes=MARKS, rounds=200)


def test_strings_without_escapes_come_back():
    """As the template of LFM2.5 writes calls."""
    check_raw_strings(Lfm2, MARKS, lambda calls: [START, f"[{', '.join(calls)}]", END], "'", 200)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Lfm2, MARKS)
