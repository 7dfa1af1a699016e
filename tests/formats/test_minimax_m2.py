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
CASES = [
    Case("two calls", BOTH, [Call("f", json.dumps({"x": CODE, "n": 2})), Call("g", "{}")]),
    Case("text around", ["a", *wrapped(invoke("g")), "b"], [Text("a"), Call("g", "{}"), Text("b")]),
    Case(
        "cut in the second call",
        [START, "\n" + invoke("f", x=CODE, n="2"), '<invoke name="g">\n<para'],
        [Call("f", json.dumps({"x": CODE, "n": 2})), Text('\n<invoke name="g">\n<para')],
        {"is_cut": True},
    ),
    Case(
        "cut in a value that quotes an end",
        [START, '<invoke name="f"><parameter name="x">a</parameter></invoke> b'],
        [Text(START + '<invoke name="f"><parameter name="x">a</parameter></invoke> b')],
        {"is_cut": True},
    ),
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
    check_round_trips(MiniMaxM2, MARKS, render, quotes=quotes, rounds=300, shares=True)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(MiniMaxM2, MARKS, ends=["</parameter>\n"])
