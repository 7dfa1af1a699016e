"""Muse Spark's messages: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.muse_spark import MuseSpark
from mlx_paged.formats.parser import Begin
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips, made

MARKS = tuple(f"<|{name}|>" for name in ("start", "message", "eom", "eot"))
START, MESSAGE, EOM, EOT = map(Mark, MARKS)
THOUGHT = [" to=self", MESSAGE, "Hm.", EOM, START, "assistant"]


def invoke(name, /, **arguments):
    inner = [f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v in arguments.items()]
    return f'<atem:invoke name="{name}">\n{"".join(inner)}</atem:invoke>\n'


def called(*invokes):
    text = "".join(invokes)
    return [" to=f", MESSAGE, f"<atem:function_calls>\n{text}</atem:function_calls>", EOM]


CODE = "    return '</atem:parameter>'\n"
CASES = [
    Case(
        "a thought and an answer",
        [*THOUGHT, " to=user", MESSAGE, "So.", EOT],
        [Thought("Hm."), Text("So.")],
    ),
    Case(
        "two calls",
        [*THOUGHT, *called(invoke("f", x=CODE, n=2), invoke("g"))],
        [Thought("Hm."), Call("f", json.dumps({"x": CODE, "n": 2})), Call("g", "{}")],
    ),
    Case("cut", called(invoke("f", x="abc"))[:3], [Call("f", '{"x": "abc"}')], {"is_cut": False}),
    Case(
        "cut in a call",
        [" to=f", MESSAGE, "<atem:function_calls>\n<atem:invoke"],
        [Text("<atem:function_calls>\n<atem:invoke")],
        {"is_cut": True},
    ),
    Case("commentary", [" to=commentary", MESSAGE, "I look.", EOM], [Text("I look.")]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(MuseSpark, MARKS, case)


def render(calls, rng):
    """As the documentation of the format has calls: texts as they are, others as JSON."""
    invokes = []
    for name, arguments in calls:
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        inner = [f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v in texts.items()]
        invokes.append(f'<atem:invoke name="{name}">\n{"".join(inner)}</atem:invoke>\n')
    return [called(*invokes)]


def test_random_calls_come_back():
    quotes = ("</atem:parameter>", "<atem:parameter>", "</atem:invoke>", "<think>")
    check_round_trips(MuseSpark, MARKS, render, quotes=quotes, rounds=200, cuts=0)


def test_where_an_answer_begins():
    form = made(MuseSpark, MARKS)
    assert form.begin("<|start|>assistant", None) == Begin.START
    assert form.begin("<|start|>assistant to=self<|message|>", None) == Begin.THOUGHT


def test_what_the_grammar_allows_is_a_call():
    check_grammar(MuseSpark, MARKS, ends=["</atem:parameter>\n"])
