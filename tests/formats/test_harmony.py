"""OpenAI's Harmony: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.harmony import Harmony
from mlx_paged.formats.parser import Begin
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips, made

NAMES = ("start", "channel", "message", "constrain", "end", "return", "call")
MARKS = tuple(f"<|{name}|>" for name in NAMES)
START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL = map(Mark, MARKS)
THOUGHT = [CHANNEL, "analysis", MESSAGE, "A thought.", END]
FINAL = [START, "assistant", CHANNEL, "final", MESSAGE, "Hello!"]


def call(name, arguments, end=CALL, first=True):
    begin = [] if first else [START, "assistant"]
    header = [CHANNEL, f"commentary to=functions.{name} ", CONSTRAIN, "json", MESSAGE]
    return [*begin, *header, arguments, end]


CASES = [
    Case(
        "a thought and an answer",
        [*THOUGHT, *FINAL, RETURN],
        [Thought("A thought."), Text("Hello!")],
    ),
    Case("the end has no mark", [*THOUGHT, *FINAL], [Thought("A thought."), Text("Hello!")]),
    Case(
        "a call",
        [*THOUGHT, *call("f", '{"x":  "1"}', first=False)],
        [Thought("A thought."), Call("f", '{"x":  "1"}')],
    ),
    Case(
        "two calls",
        [*call("f", "{}", END), *call("g", "{}", first=False)],
        [Call("f", "{}"), Call("g", "{}")],
    ),
    Case(
        "the recipient before the channel",
        [" to=functions.f", CHANNEL, "commentary", MESSAGE, "{}", CALL],
        [Call("f", "{}")],
    ),
    Case(
        "a type without its mark",
        [CHANNEL, "commentary to=functions.f code", MESSAGE, "{}", CALL],
        [Call("f", "{}")],
    ),
    Case(
        "a call in the channel analysis",
        [CHANNEL, "analysis to=functions.f", MESSAGE, "{}", CALL],
        [Call("f", "{}")],
    ),
    Case(
        "a preamble",
        [CHANNEL, "commentary", MESSAGE, "I look. ", END, *call("f", "{}", first=False)],
        [Text("I look. "), Call("f", "{}")],
    ),
    Case("a call whose mark is missing", call("f", "{}")[:-1], [Call("f", "{}")]),
    Case("a call that is cut", call("f", '{"x": "1')[:-1], [Text('{"x": "1')], {"is_cut": True}),
    Case(
        "a header that is cut",
        [*THOUGHT, START, "assistant", CHANNEL, "fin"],
        [Thought("A thought.")],
        {"is_cut": True},
    ),
    Case("no JSON", call("python", "print(1)"), [Text("print(1)")]),
    Case("no tools", call("f", "{}"), [Text("{}")], {"tools": []}),
    Case("no marks", "Hello you.", [Text("Hello you.")]),
    Case(
        "tags are text",
        [CHANNEL, "final", MESSAGE, "<think> <tool_call>"],
        [Text("<think> <tool_call>")],
    ),
    Case(
        "marks as text are no marks",
        [CHANNEL, "final", MESSAGE, "a<|end|>b"],
        [Text("a<|end|>b")],
        {"vocabularies": (MARKS,)},
    ),
    Case(
        "the prompt opens a thought",
        ["a", END, *FINAL],
        [Thought("a"), Text("Hello!")],
        {"begin": Begin.THOUGHT},
    ),
    Case("the prompt opens the answer", ["a", RETURN], [Text("a")], {"begin": Begin.CONTENT}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Harmony, MARKS, case)


def render(calls, rng):
    return [
        call(name, json.dumps(arguments), END if i + 1 < len(calls) else CALL, i == 0)
        for i, (name, arguments) in enumerate(calls)
    ]


def test_random_calls_come_back():
    check_round_trips(
        Harmony, MARKS, render, quotes=("<think>", "</tool_call>"), rounds=300, cuts=0
    )


@pytest.mark.parametrize(
    ("prompt", "begin"),
    [
        ("<|start|>assistant", Begin.START),
        ("<|start|>assistant<|channel|>analysis<|message|>", Begin.THOUGHT),
        ("<|start|>assistant<|channel|>final<|message|>", Begin.CONTENT),
    ],
)
def test_where_an_answer_begins(prompt, begin):
    assert made(Harmony, MARKS).begin(prompt, None) == begin
