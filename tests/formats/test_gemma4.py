"""Calls of Gemma4: cases of the format, and random calls."""

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.gemma4 import Gemma4
from tests.support.formats.gemmas import gemma_render
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

MARKS = Gemma4.tokens
START, END, QUOTE = map(Mark, MARKS)
TEXT = [QUOTE, "  a\n}", QUOTE]


def call(*parts):
    return [START, "call:f{", *parts, "}", END]


def value(written, expected):
    return Case(written, call(f"x:{written}"), [Call("f", f'{{"x": {expected}}}')])


def text(*parts):
    return Case("".join(parts), list(parts), [Text("".join(parts))])


CASES = [
    Case("a string", ["a", *call("x:", *TEXT)], [Text("a"), Call("f", '{"x": "  a\\n}"}')]),
    Case(
        "two calls",
        [*call("n:2"), START, "call:g{}", END],
        [Call("f", '{"n": 2}'), Call("g", "{}")],
    ),
    Case("one wrapper", [START, "call:f{}call:g{}", END], [Call("f", "{}"), Call("g", "{}")]),
    Case("no end", call("n:2")[:-1], [Call("f", '{"n": 2}')]),
    value("10000000000000000000000000", "10000000000000000000000000"),
    value("1.50", "1.50"),
    value("None", "null"),
    value("true", "true"),
    value("12:00", '"12:00"'),
    value("Paris", '"Paris"'),
    value("NaN", '"NaN"'),
    value('"a"', '"a"'),
    value("{a:[1,{}],b:{}}", '{"a": [1, {}], "b": {}}'),
    value('{"a": [ ]}', '{"a": []}'),
    Case(
        "marks in a string",
        call("x:", QUOTE, str(END), QUOTE),
        [Call("f", '{"x": ' + f'"{END}"'.replace('|"|', '|\\"|') + "}")],
    ),
    text(START, "call:f g{}", END),
    text(START, "f{}", END),
    text(START, "call:f{x}", END),
    text(START, "call:f{x:1,x:2}", END),
    text(START, "call:f{x:}", END),
    Case("cut", call("x:", *TEXT)[:4], [Text("".join(call("x:", *TEXT)[:4]))], {"is_cut": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:20])
def test_cases(case):
    check_case(Gemma4, MARKS, case)


def test_random_calls_come_back():
    check_round_trips(Gemma4, MARKS, gemma_render(*MARKS), quotes=MARKS, rounds=200)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Gemma4, MARKS, ends=(str(QUOTE),))
