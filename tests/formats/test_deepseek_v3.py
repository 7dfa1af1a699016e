"""DeepSeek's marks of V3 and V3.1: cases of the formats, and random calls."""

import json

import pytest

from mlx_paged.formats.deepseek_v3 import DeepSeekV3, DeepSeekV31
from mlx_paged.formats.events import Call, Text, Thought
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

NAMES = ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
MARKS = tuple(f"<｜tool▁{name}｜>" for name in NAMES)
START, BEGIN, SEPARATOR, END_CALL, END = map(Mark, MARKS)
F = '{"x":  "1"}'


def v3(name, arguments="{}"):
    """As the template of DeepSeek V3 writes a call."""
    return [BEGIN, "function", SEPARATOR, f"{name}\n```json\n{arguments}\n```", END_CALL]


def v31(name, arguments="{}"):
    """As the template of DeepSeek V3.1 writes a call."""
    return [BEGIN, name, SEPARATOR, arguments, END_CALL]


def as_text(*parts):
    return [Text("".join(parts))]


def cases(call, other, between):
    """Those of a format whose calls `call` writes, and not `other`."""
    both = [START, *call("f", F), between, *call("g"), END]
    calls = [Call("f", F), Call("g", "{}")]
    quoted = '{"x": "```<｜tool▁call▁end｜>"}'
    bad = [[START, *call("f g"), END], [START, *call("f", "[]"), END], [START, END]]
    bad += [[START, *other("g"), END], [START, *call("f", '{"x": NaN}'), END]]
    return [
        Case("two calls", ["So: ", *both], [Text("So: "), *calls]),
        Case("marks in a string", [START, *call("f", quoted), END], [Call("f", quoted)]),
        Case("a name with dots", [START, *call("a.b-c"), END], [Call("a.b-c", "{}")]),
        Case("no last mark", both[:-1], calls),
        Case("cut in the first call", both[:4], as_text(*both[:4]), {"is_cut": True}),
        Case(
            "cut in the second call",
            both[:9],
            [Call("f", F), *as_text(*both[6:9])],
            {"is_cut": True},
        ),
        Case(
            "behind a thought",
            ["<think>a</think>", *both],
            [Thought("a"), *calls],
            {"vocabularies": ((),)},
        ),
        *(Case(f"no call {i}", parts, as_text(*parts)) for i, parts in enumerate(bad)),
        Case("marks as text", "".join(both), as_text(*both), {"vocabularies": (MARKS,)}),
    ]


@pytest.mark.parametrize("case", cases(v3, v31, "\n"), ids=lambda case: case.name)
def test_cases_of_v3(case):
    check_case(DeepSeekV3, MARKS, case)


@pytest.mark.parametrize("case", cases(v31, v3, ""), ids=lambda case: case.name)
def test_cases_of_v31(case):
    check_case(DeepSeekV31, MARKS, case)


KINDS = [(DeepSeekV3, v3, "\n"), (DeepSeekV31, v31, "")]


@pytest.mark.parametrize(("kind", "call", "between"), KINDS)
def test_random_calls_come_back(kind, call, between):
    def render(calls, rng):
        parts = [START]
        for i, (name, arguments) in enumerate(calls):
            parts += [between] if i else []
            parts += call(name, json.dumps(arguments, ensure_ascii=rng.random() < 0.5))
        return [[*parts, END]]

    quotes = (*MARKS, "\n```", "```json\n")
    check_round_trips(kind, MARKS, render, quotes=quotes, rounds=200, shares=True)


@pytest.mark.parametrize("kind", [DeepSeekV3, DeepSeekV31])
def test_what_the_grammar_allows_is_a_call(kind):
    check_grammar(kind, MARKS)
