"""MiniMax M2's XML: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.minimax_m2 import MiniMaxM2
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

MARKS = ("<minimax:tool_call>", "</minimax:tool_call>")
START, END = map(Mark, MARKS)


def invoke(name, /, **arguments):
    """As the template of MiniMax M2 writes a call."""
    inner = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in arguments.items())
    return f'<invoke name="{name}">\n{inner}</invoke>\n'


def wrapped(*invokes):
    return [START, "\n" + "".join(invokes), END]


CODE = "    return '</parameter>'\n"
BOTH = wrapped(invoke("f", x=CODE, n="2"), invoke("g"))
LARGE = '{"n": 9007199254740993}'
CASES = [
    Case("two calls", BOTH, [Call("f", json.dumps({"x": CODE, "n": 2})), Call("g", "{}")]),
    Case("text around", ["a", *wrapped(invoke("g")), "b"], [Text("a"), Call("g", "{}"), Text("b")]),
    Case("cut", BOTH[:2], [Text("".join(BOTH[:2]))], {"is_cut": True}),
    Case("no invoke", wrapped("so"), [Text("".join(wrapped("so")))]),
    Case(
        "a number",
        wrapped(invoke("f", n="9223372036854775807")),
        [Call("f", '{"n": 9223372036854775807}')],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(MiniMaxM2, MARKS, case)


def render(calls, rng):
    invokes = []
    for name, arguments in calls:
        inner = ""
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            inner += f'<parameter name="{key}">{text}</parameter>\n'
        invokes.append(f'<invoke name="{name}">\n{inner}</invoke>\n')
    return [wrapped(*invokes)]


def test_random_calls_come_back():
    quotes = ("</parameter>", '<parameter name="zz">', "</invoke>", "<think>")
    check_round_trips(MiniMaxM2, MARKS, render, quotes=quotes, rounds=300)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(MiniMaxM2, MARKS, ends=["</parameter>\n"])
