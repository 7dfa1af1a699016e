"""GLM's tags: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.glm import Glm
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips

NAMES = ("tool_call", "arg_key", "arg_value")
MARKS = tuple(f"<{slash}{name}>" for name in NAMES for slash in ("", "/"))
START, END, KEY, KEY_END, VALUE, VALUE_END = map(Mark, MARKS)


def call(name, /, line="\n", **arguments):
    """As the templates of GLM 4.5 write a call; with an empty `line`, of GLM 4.7."""
    parts = [START, name, line]
    for key, value in arguments.items():
        parts += [KEY, key, KEY_END, line, VALUE, value, VALUE_END, line]
    return [*parts, END]


CODE = "    return '</arg_value>'\n"
CASES = [
    Case("a call", call("f", x=CODE, n="2"), [Call("f", json.dumps({"x": CODE, "n": 2}))]),
    Case("without line breaks", call("f", "", x=" a\n"), [Call("f", '{"x": " a\\n"}')]),
    Case("no arguments", call("f"), [Call("f", "{}")]),
    Case(
        "no such parameter",
        call("f", x="1", z="2"),
        [Call("f", '{"x": "1", "z": "2"}')],
        {"vocabularies": (MARKS,)},
    ),
    Case("null", call("f", x="null"), [Call("f", '{"x": "null"}')]),
    Case(
        "a large integer",
        call("f", n="12345678901234567890"),
        [Call("f", '{"n": 12345678901234567890}')],
    ),
    Case(
        "cut",
        call("f", x="abc", n="2")[:12],
        [Text("".join(call("f", x="abc", n="2")[:12]))],
        {"is_cut": True},
    ),
    Case("a name with a space", [START, "f g", END], [Text("".join([START, "f g", END]))]),
    Case("prose", ["Write ", START, " first."], [Text(f"Write {START} first.")]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Glm, MARKS, case)


@pytest.mark.parametrize("line", ["", "\n"])
def test_random_calls_come_back(line):
    def render(calls, rng):
        wrappers = []
        for name, arguments in calls:
            texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
            parts = call(name)[:2]
            for key, value in texts.items():
                parts += [line, KEY, key, KEY_END, line, VALUE, value, VALUE_END]
            wrappers.append([*(["\n"] if wrappers else []), *parts, line, END])
        return wrappers

    check_round_trips(Glm, MARKS, render, quotes=("</arg_value>", "<arg_key>", START), rounds=200)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Glm, MARKS, ends=["</arg_value>", "</arg_value>\n"])
