"""LongCat's tags: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.longcat import Longcat
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

NAMES = ("tool_call", "arg_key", "arg_value")
MARKS = tuple(f"<{slash}longcat_{name}>" for name in NAMES for slash in ("", "/"))
START, END, KEY, KEY_END, VALUE, VALUE_END = map(Mark, MARKS)


def call(name, /, **arguments):
    """As the template of LongCat-Flash writes a call."""
    parts = [START, f"{name}\n"]
    for key, value in arguments.items():
        parts += [KEY, key, KEY_END, "\n", VALUE, value, VALUE_END, "\n"]
    return [*parts, END]


CODE = "    return 1\n"
CASES = [
    Case("a call", call("f", x=CODE, n="2"), [Call("f", json.dumps({"x": CODE, "n": 2}))]),
    Case("no arguments", call("f"), [Call("f", "{}")]),
    Case(
        "JSON",
        [START, '\n{"name": "f", "arguments": {"x":  "1"}}\n', END],
        [Call("f", '{"x":  "1"}')],
    ),
    Case("cut", call("f", x=CODE)[:6], [Text("".join(call("f", x=CODE)[:6]))], {"is_cut": True}),
    Case("a name with a space", [START, "f g", END], [Text("".join([START, "f g", END]))]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Longcat, MARKS, case)


def render(calls, rng):
    wrappers = []
    for name, arguments in calls:
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        wrappers.append([*(["\n"] if wrappers else []), *call(name, **texts)])
    return wrappers


def test_random_calls_come_back():
    check_round_trips(Longcat, MARKS, render, quotes=("</longcat_arg_value>", START), rounds=200)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Longcat, MARKS)
