"""Kimi K3's tags: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.kimi_k3 import KimiK3
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

MARKS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
OPEN, CLOSE, SEP, _ = map(Mark, MARKS)


def tagged(name, *inner, attributes=""):
    return [OPEN, name + attributes, SEP, *inner, CLOSE, name, SEP]


def call(name, /, **values):
    """A call with arguments of any type."""
    inner = []
    for key, value in values.items():
        kind = "string" if isinstance(value, str) else "object"
        text = value if isinstance(value, str) else json.dumps(value)
        inner += tagged("argument", text, attributes=f' key="{key}" type="{kind}"')
    return tagged("call", *inner, attributes=f' tool="{name}" index="1"')


CODE = "    return '</argument>'\n"
RAW = tagged("json", '{"x":  1}', attributes=' type="object"')
CASES = [
    Case(
        "a thought, an answer and a call",
        [
            *tagged("think", "Hm."),
            *tagged("response", "So."),
            *tagged("tools", *call("f", x=CODE, n=2)),
            *(CLOSE, "message", SEP),
        ],
        [Thought("Hm."), Text("So."), Call("f", json.dumps({"x": CODE, "n": 2}))],
        {"style": "xtml"},
    ),
    Case(
        "two calls, the second with an object",
        tagged("tools", *call("f"), "\n", *tagged("call", *RAW, attributes=' tool="g" index="2"')),
        [Call("f", "{}"), Call("g", '{"x":  1}')],
    ),
    Case("null as text", tagged("tools", *call("f", x="null")), [Call("f", '{"x": "null"}')]),
    Case(
        "cut",
        tagged("tools", *call("f", x="abc"))[:9],
        [Text("".join(tagged("tools", *call("f", x="abc"))[:9]))],
        {"is_cut": True},
    ),
    Case(
        "no tools",
        tagged("tools", *call("f")),
        [Text("".join(tagged("tools", *call("f"))))],
        {"tools": []},
    ),
    Case(
        "a name with a space",
        tagged("tools", *call("f g")),
        [Text("".join(tagged("tools", *call("f g"))))],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(KimiK3, MARKS, case)


def render(calls, rng):
    return [tagged("tools", *(part for name, values in calls for part in call(name, **values)))]


def test_random_calls_come_back():
    quotes = ("</argument>", "<|open|>", "<|sep|>", "argument")
    check_round_trips(KimiK3, MARKS, render, quotes=quotes, rounds=300, shares=True)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(KimiK3, MARKS)
