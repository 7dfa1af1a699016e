"""XML of Seed-OSS: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.seed_oss import SeedOss
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips, function

TAGS = ("<seed:tool_call>", "</seed:tool_call>")
MARKS = (*TAGS, "<seed:think>", "</seed:think>")
START, END, THINK, THOUGHT = map(Mark, MARKS)


def body(name, /, **arguments):
    """As the template of Seed-OSS writes a function."""
    written = "".join(f"<parameter={k}>{v}</parameter>\n" for k, v in arguments.items())
    return f"\n<function={name}>\n{written}</function>\n"


def call(name, /, **arguments):
    return [START, body(name, **arguments), END]


B = function("f", b={"type": "boolean"})
CODE = "\n    return '</parameter>'\n"
CASES = [
    Case(
        "a call",
        ["So:\n", *call("f", x="1", n="2")],
        [Text("So:\n"), Call("f", '{"x": "1", "n": 2}')],
    ),
    Case("no arguments", call("f"), [Call("f", "{}")]),
    Case("lines of a value", call("f", x=CODE), [Call("f", json.dumps({"x": CODE}))]),
    Case("an empty value", call("f", x=""), [Call("f", '{"x": ""}')]),
    Case(
        "two calls",
        [*call("f", x="1"), "\n", *call("g", y="2")],
        [Call("f", '{"x": "1"}'), Call("g", '{"y": "2"}')],
    ),
    Case(
        "behind a thought",
        [THINK, "a", THOUGHT, *call("g")],
        [Thought("a"), Call("g", "{}")],
        {"style": "seed"},
    ),
    Case("Python writes True", call("f", b="True"), [Call("f", '{"b": true}')], {"tools": [B]}),
    Case(
        "a large integer",
        call("f", n="12345678901234567890"),
        [Call("f", '{"n": 12345678901234567890}')],
    ),
    Case("a name with a space", [START, "<function=f g></function>", END], None),
    Case("other tags", "<tool_call>\n<function=f>\n</function>\n</tool_call>", None),
    Case("cut", call("f", x="abc")[:2], None, {"is_cut": True}),
    Case("tags that are no tokens", "".join(call("f")), None, {"vocabularies": (MARKS,)}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    if case.expected is None:
        case = case._replace(expected=[Text("".join(case.parts))])
    check_case(SeedOss, MARKS, case)


def render(calls, rng):
    wrappers = []
    for name, arguments in calls:
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        wrappers.append(["\n", *call(name, **texts)])
    return wrappers


QUOTES = ("</parameter>", "<parameter=zz>", "</function>", "<function=f>", *TAGS)


def test_random_calls_come_back():
    check_round_trips(SeedOss, MARKS, render, quotes=QUOTES, rounds=200)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(SeedOss, MARKS, ends=["</parameter>\n"])
