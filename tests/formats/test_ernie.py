"""ERNIE's calls and the marks of its content: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.choice import chosen
from mlx_paged.formats.ernie import Ernie
from mlx_paged.formats.events import Call, Text, Thought
from tests.formats.test_registry import tokenizer
from tests.support.commands.scripted_models import template
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

MARKS = tuple(
    f"<{slash}{name}>" for name in ("think", "response", "tool_call") for slash in ("", "/")
)
THINK, THOUGHT, ANSWER, ANSWERED, START, END = map(Mark, MARKS)
TOKENS = {"vocabularies": (MARKS,)}


def call(name, arguments="{}"):
    return [START, f'\n{{"name": "{name}", "arguments": {arguments}}}\n', END, "\n"]


def answer(text):
    return [ANSWER, "\n", text, "\n", ANSWERED, "\n"]


THOUGHTS = [THINK, "\na\n", THOUGHT, "\n\n"]
CASES = [
    Case("an answer", [*THOUGHTS, *answer("b\nc")], [Thought("\na\n"), Text("b\nc")], TOKENS),
    Case("no line around", [ANSWER, "b", ANSWERED], [Text("b")], TOKENS),
    Case("lines of the answer", answer("\n  b\n"), [Text("\n  b\n")], TOKENS),
    Case("an answer that is cut", answer("b")[:3], [Text("b")], TOKENS | {"is_cut": True}),
    Case("marks as text", "<response>\nb\n</response>", [Text("<response>\nb\n</response>")]),
    Case("no tools", answer("b"), [Text("b")], TOKENS | {"tools": []}),
    Case(
        "a call",
        [*THOUGHTS, *call("f", '{"x":  "1"}')],
        [Thought("\na\n"), Call("f", '{"x":  "1"}')],
    ),
    Case("two calls", [*call("f"), *call("g")], [Call("f", "{}"), Call("g", "{}")]),
    Case(
        "an answer and a call",
        [*answer("b"), "\n", *call("f")],
        [Text("b"), Call("f", "{}")],
        TOKENS,
    ),
    Case("cut", call("f")[:2], [Text("".join(call("f")[:2]))], {"is_cut": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Ernie, MARKS, case)


def test_the_tokens_of_the_marks_choose():
    found = chosen(tokenizer(template("json_tools"), MARKS))
    assert (found.format.name, found.problem) == ("ernie45", None)


def render(calls, rng):
    written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    return [call(name, arguments) for name, arguments in written]


def test_random_calls_come_back():
    check_round_trips(Ernie, MARKS, render, quotes=("</tool_call>", "</response>"), rounds=200)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Ernie, MARKS)
