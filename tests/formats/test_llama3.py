"""Calls of Llama 3: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.llama3 import Llama3
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

MARKS = ("<|python_tag|>", "<|eom_id|>")
TAG = Mark(MARKS[0])
F, G = '{"name": "f", "parameters": {"x":  "1"}}', '{"name": "g", "parameters": {}}'
CALLS = [Call("f", '{"x":  "1"}'), Call("g", "{}")]


def text(written):
    return Case(written, written, [Text(written)])


CASES = [
    Case("a call", F, CALLS[:1]),
    Case("two calls", f"{F}; {G}", CALLS),
    Case("two lines", f"{F}\n{G}", CALLS),
    Case("a semicolon at the end", f"{F};", CALLS[:1]),
    Case("arguments", '{"name": "g", "arguments": {}}', CALLS[1:]),
    Case("a type", '{"type": "function", "name": "g", "parameters": {}}', CALLS[1:]),
    Case("the token", ["so ", TAG, f"{F}; {G}"], [Text("so "), *CALLS]),
    Case("text behind", f"{F} so", [CALLS[0], Text(" so")]),
    Case("a built-in tool", [TAG, 'web.call(query="a b")'], [Call("web", '{"query": "a b"}')]),
    Case("code", [TAG, "print(1)"], [Text(f"{TAG}print(1)")]),
    text('{"name": "f"}'),
    text('{"a": 1}'),
    text("{so}"),
    text('{"name": "f g", "parameters": {}}'),
    text('{"name": "f", "parameters": [1]}'),
    text('{"name": "f", "parameters": {"n": NaN}}'),
    text(f"a {F}"),
    Case("no tools", F, [Text(F)], {"tools": ()}),
    Case("cut", F[:20], [Text(F[:20])], {"is_cut": True}),
    Case(
        "cut in the second call", f"{F}; {G[:9]}", [CALLS[0], Text(f"; {G[:9]}")], {"is_cut": True}
    ),
    Case(
        "data",
        '{"name": "h", "parameters": {}}',
        [Text('{"name": "h", "parameters": {}}')],
        {"is_data": True},
    ),
    Case("a call beside data", F, CALLS[:1], {"is_data": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:25])
def test_cases(case):
    check_case(Llama3, MARKS, case)


def objects(calls):
    """As the template of Llama 3.1 writes a call, in JSON."""
    return [
        f'{{"name": "{name}", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'
        for name, arguments in calls
    ]


@pytest.mark.parametrize("tag", [(), (TAG,)])
def test_random_calls_come_back(tag):
    def render(calls, rng):
        return [[*tag, "; ".join(objects(calls))]]

    check_round_trips(Llama3, MARKS, render, quotes=(*MARKS, "};"), rounds=200, shares=True)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Llama3, MARKS)
