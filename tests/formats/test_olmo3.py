"""OLMo 3's calls: cases of the format, and random calls."""

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.olmo3 import Olmo3
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips
from tests.support.formats.pythons import as_json, as_python, check_raw_strings

MARKS = ("<function_calls>", "</function_calls>")
START, END = map(Mark, MARKS)
CALLS = [Call("f", '{"x": "1", "n": null}'), Call("g", "{}")]
BOTH = "\nf(x='1', n=null)\ng()\n"
QUOTED = "f(x='</function_calls>\ng()')"
CASES = [
    Case("two calls", ["a", START, BOTH, END], [Text("a"), *CALLS]),
    Case("one line", [START, "g()", END], CALLS[1:]),
    Case("two calls in a line", [START, "g() g()", END], [Text(f"{START}g() g(){END}")]),
    Case(
        "marks in a string",
        [START, QUOTED, END],
        [Call("f", '{"x": "</function_calls>\\ng()"}')],
    ),
    Case("no end", [START, BOTH], CALLS),
    Case("no call", [START, "see", END], [Text(f"{START}see{END}")]),
    Case("cut", [START, BOTH[:20]], [CALLS[0], Text("\ng(")], {"is_cut": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Olmo3, MARKS, case)


def render(value):
    def rendered(calls, rng):
        lines = "\n".join(as_python(*call, value) for call in calls)
        return [[START, f"\n{lines}\n", END]]

    return rendered


@pytest.mark.parametrize("value", [repr, as_json])
def test_random_calls_come_back(value):
    quotes = (*MARKS, ")\n</function_calls>", "', x='")
    check_round_trips(Olmo3, MARKS, render(value), quotes=quotes, rounds=200, shares=True)


def test_strings_without_escapes_come_back():
    """As the template of OLMo 3 writes calls."""
    check_raw_strings(
        Olmo3, MARKS, lambda calls: [START, "\n", "\n".join(calls), "\n", END], "'", 200
    )


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Olmo3, MARKS)
