"""Calls in a list of Python: cases of the format, and random calls."""

import pytest

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.pythonic import Pythonic
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import (
    TOOLS,
    Case,
    check_case,
    check_round_trips,
    function,
    made,
    merged,
)
from tests.support.formats.pythons import as_json, as_python, check_raw_strings

BIG = 10**40
CALLS = [Call("f", '{"x": "1", "n": 2}'), Call("g", "{}")]


def value(written, expected):
    return Case(written, f"[f(x={written})]", [Call("f", f'{{"x": {expected}}}')])


def text(written):
    return Case(written, written, [Text(written)])


CASES = [
    Case("two calls", '[f(x="1", n=2), g()]', CALLS),
    Case("white space", '\n[\n  f( x = "1" , n=2, ),\n  g( )\n]\n', CALLS),
    Case("after a thought", '<think>[g()]</think>[f(x="1", n=2), g()]', [Thought("[g()]"), *CALLS]),
    Case("two lists", '[f(x="1", n=2)]\n[g()]', CALLS),
    Case("a name that is not declared", "[h.i(z=None)]", [Call("h.i", '{"z": null}')]),
    value("'a\\n\\'b\\''", "\"a\\n'b'\""),
    value('"a\n  b"', '"a\\n  b"'),
    value('"""a "b" c"""', '"a \\"b\\" c"'),
    value("r'a\\n'", '"a\\\\n"'),
    value("'\\u00e9\\ud83d\\ude42\\x41\\101'", '"é🙂AA"'),
    value("'\\ud83d \\q'", '"\\\\ud83d \\\\q"'),
    value("'it's'", '"it\'s"'),
    value("'[g()]'", '"[g()]"'),
    value(f"{BIG}", f"{BIG}"),
    value(f"-{BIG}", f"-{BIG}"),
    value("1_000", "1000"),
    value("0x10", "16"),
    value("1.50", "1.50"),
    value("1.", "1.0"),
    value("1e3", "1e3"),
    value("+.5", "0.5"),
    value("True", "true"),
    value("false", "false"),
    value("None", "null"),
    value("[1, 'a', [], {}]", '[1, "a", [], {}]'),
    value("(1, (2,), ())", "[1, [2], []]"),
    value("{'a': {1: [True]}, \"b\": null,}", '{"a": {"1": [true]}, "b": null}'),
    text("[1] see below"),
    text("[f] (x=1)"),
    text("[f(1)]"),
    text("[f(x=y)]"),
    text("[f(x=nan)]"),
    text("[f(x=inf)]"),
    text("[f(x=1e999)]"),
    text("[f(x=(1))]"),
    text("[f(x={1, 2})]"),
    text("[f(x=1, x=2)]"),
    text("[f(x=g())]"),
    text("[f(x=b'1')]"),
    text("[f(**{})]"),
    text("[f g()]"),
    text("[]"),
    text("[f()] is a call"),
    text("a [f()]"),
    text("[f(x=" + "[" * 300 + "]" * 300 + ")]"),
    Case("no tools", "[f()]", [Text("[f()]")], {"tools": ()}),
    Case("cut", "[g(), f(x='1", [Call("g", "{}"), Text(", f(x='1")], {"is_cut": True}),
    Case("cut text", "[f()] is a", [Text("[f()] is a")], {"is_cut": True}),
    Case("cut list", "[f(), is a", [Text("[f(), is a")], {"is_cut": True}),
    Case(
        "cut where a value looks like the end",
        "[f(x='a', y=')]",
        [Text("[f(x='a', y=')]")],
        {"is_cut": True},
    ),
    Case("cut in the first call", "[f(x='1'", [Text("[f(x='1'")], {"is_cut": True}),
    Case(
        "a key that is not declared ends no value",
        "[f(x='a', z='b' c', n=2)]",
        [Call("f", '{"x": "a\', z=\'b\' c", "n": 2}')],
    ),
    Case(
        "a key that is not declared",
        "[f(x='a', z='b')]",
        [Call("f", '{"x": "a", "z": "b"}')],
    ),
    Case(
        "data",
        "[f()]",
        [Call("f", "{}")],
        {"is_data": True, "tools": [function("f")]},
    ),
    Case("other data", "[h()]", [Text("[h()]")], {"is_data": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:20])
def test_cases(case):
    check_case(Pythonic, (), case)


def render(value):
    def rendered(calls, rng):
        return [[f"[{', '.join(as_python(*call, value) for call in calls)}]"]]

    return rendered


@pytest.mark.parametrize("value", [repr, as_json])
def test_random_calls_come_back(value):
    quotes = (")]", "', x='", '"', "[f(x=1)]")
    check_round_trips(Pythonic, (), render(value), quotes=quotes, rounds=200, shares=True)


def test_strings_without_escapes_come_back():
    """As the templates of Llama 4 write calls."""
    check_raw_strings(Pythonic, (), lambda calls: [f"[{', '.join(calls)}]"], '"', 200)


def test_a_list_that_is_no_call_is_told_at_once():
    parser = made(Pythonic, (), None).parser(TOOLS, Begin.START)
    assert merged(parser.feed(None, "[1] see") + parser.feed(None, " below")) == [
        Text("[1] see below")
    ]


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Pythonic, ())
