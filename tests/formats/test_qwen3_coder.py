"""XML of Qwen3-Coder: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text
from mlx_paged.formats.qwen3_coder import Qwen3Coder
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips, function

MARKS = ("<tool_call>", "</tool_call>")
START, END = map(Mark, MARKS)


def body(name, /, **arguments):
    written = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"\n<function={name}>\n{written}</function>\n"


def call(name, /, **arguments):
    return [START, body(name, **arguments), END]


def typed(text, schema):
    """A case of one argument, by its schema."""
    return {"tools": [function("f", x=schema)]}, call("f", x=text)


def case_of(text, schema, expected):
    options, parts = typed(text, schema)
    value = json.dumps(expected) if isinstance(expected, str) else expected[0]
    return Case(f"{text} as {schema}", parts, [Call("f", f'{{"x": {value}}}')], options)


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TYPES = [
    case_of("null", STRING, "null"),
    case_of("null", {"type": ["string", "null"]}, ["null"]),
    case_of(" null", {"type": ["string", "null"]}, " null"),
    case_of("123", {"type": ["string", "null"]}, "123"),
    case_of("[1]", {"anyOf": [STRING, {"type": "null"}]}, "[1]"),
    case_of("123", {"anyOf": [STRING, INTEGER]}, "123"),
    case_of("1234567890123456789", INTEGER, ["1234567890123456789"]),
    case_of("9007199254740993", INTEGER, ["9007199254740993"]),
    case_of("0800", INTEGER, "0800"),
    case_of("5.0", INTEGER, ["5.0"]),
    case_of("5.5", INTEGER, "5.5"),
    case_of("12:00", INTEGER, "12:00"),
    case_of("9223372036854775807", {"type": "number"}, ["9223372036854775807"]),
    case_of("1e20", {"type": "number"}, ["1e20"]),
    case_of("NaN", {"type": "number"}, "NaN"),
    case_of("1e400", {"type": "number"}, "1e400"),
    case_of("true", {"type": ["boolean", "null"]}, ["true"]),
    case_of("1", {"type": "boolean"}, "1"),
    case_of('{"a":  [1, null]}', {"type": "object"}, ['{"a":  [1, null]}']),
    case_of("{'a': 1}", {"type": "object"}, "{'a': 1}"),
    case_of('{"a": NaN}', {"type": "object"}, '{"a": NaN}'),
    case_of("[1, 2]", {"type": "array"}, ["[1, 2]"]),
    case_of('["a"]', {"anyOf": [STRING, {"type": "array"}]}, ['["a"]']),
    case_of("1", {"enum": ["1", "2"]}, "1"),
    case_of("1", {"enum": [1, 2]}, ["1"]),
    case_of("7", {"const": 7}, ["7"]),
    case_of("b", {"const": "a"}, "b"),
    case_of("5", {"$ref": "#/$defs/nowhere"}, "5"),
    case_of("5", {"allOf": [INTEGER, {"minimum": 1}]}, ["5"]),
    case_of("[]", {}, ["[]"]),
    case_of("5", {}, "5"),
    case_of("5", {"type": "int"}, ["5"]),
]
CODE = "    def f():\n\treturn '</parameter>'\n\n"
CASES = [
    Case(
        "a call",
        ["Now: ", *call("f", x="1", n="2")],
        [Text("Now: "), Call("f", '{"x": "1", "n": 2}')],
    ),
    Case("no arguments", call("f"), [Call("f", "{}")]),
    Case(
        "two calls",
        [*call("f", x="1"), "\n", *call("g", y="2")],
        [Call("f", '{"x": "1"}'), Call("g", '{"y": "2"}')],
    ),
    Case(
        "two functions in one wrapper",
        [START, body("f", x="1") + body("g", y="2"), END],
        [Call("f", '{"x": "1"}'), Call("g", '{"y": "2"}')],
    ),
    Case("code", call("f", x=CODE), [Call("f", json.dumps({"x": CODE}))]),
    Case(
        "an end of a value in a value",
        call("f", x="a</parameter>b"),
        [Call("f", '{"x": "a</parameter>b"}')],
    ),
    Case(
        "all ends in a value",
        call("f", x="a\n</parameter>\n</function>\nb"),
        [Call("f", json.dumps({"x": "a\n</parameter>\n</function>\nb"}))],
    ),
    Case(
        "a parameter that is not declared, in a value",
        call("f", x="a\n</parameter>\n<parameter=z>\nb"),
        [Call("f", json.dumps({"x": "a\n</parameter>\n<parameter=z>\nb"}))],
    ),
    Case(
        "a parameter that is given already",
        call("f", n="1", x="a\n</parameter>\n<parameter=n>\nb"),
        [Call("f", json.dumps({"n": 1, "x": "a\n</parameter>\n<parameter=n>\nb"}))],
    ),
    Case(
        "a call in a value, its tags as text",
        call("f", x="".join(call("g", y="1")) + "!"),
        [Call("f", json.dumps({"x": "".join(call("g", y="1")) + "!"}))],
    ),
    Case(
        "an end tag in a value",
        [START, "<function=f><parameter=x>a", END, "b</parameter></function>", END],
        [Call("f", '{"x": "a</tool_call>b"}')],
    ),
    Case(
        "a broken call before another",
        [START, "<function=f><parameter=x>a", END, "\n", *call("g", y="1")],
        [Text("<tool_call><function=f><parameter=x>a</tool_call>\n"), Call("g", '{"y": "1"}')],
        {"vocabularies": (MARKS,)},
    ),
    Case("text after a call", [*call("f", x="1"), " so"], [Call("f", '{"x": "1"}'), Text(" so")]),
    Case("a parameter that no function has", call("f", z="1"), [Call("f", '{"z": "1"}')]),
    Case("no such function", call("other", a="1", b="2"), [Call("other", '{"a": "1", "b": "2"}')]),
    Case(
        "a name with a space",
        [START, "<function=f g></function>", END],
        [Text("<tool_call><function=f g></function></tool_call>")],
    ),
    Case(
        "cut",
        [*call("g", y="1"), START, body("f", x="1")[:30]],
        [Call("g", '{"y": "1"}'), Text("<tool_call>" + body("f", x="1")[:30])],
        {"is_cut": True},
    ),
    Case("no end tag at the end", [START, body("f", x="1")], [Call("f", '{"x": "1"}')]),
    Case(
        "a reference",
        call("f", x="5"),
        [Call("f", '{"x": 5}')],
        {
            "tools": [
                {
                    "function": {
                        "name": "f",
                        "parameters": {
                            "$defs": {"n": {"type": "integer"}},
                            "properties": {"x": {"$ref": "#/$defs/n"}},
                        },
                    }
                }
            ]
        },
    ),
]


@pytest.mark.parametrize("case", CASES + TYPES, ids=lambda case: case.name)
def test_cases(case):
    check_case(Qwen3Coder, MARKS, case)


def render(calls, rng):
    """As the template of Qwen3-Coder writes calls: texts as they are, others as JSON."""
    wrappers = []
    for i, (name, arguments) in enumerate(calls):
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        wrappers.append([*([] if i == 0 else ["\n"]), *call(name, **texts)])
    return wrappers


QUOTES = ("</parameter>", "<parameter=zz>", "</function>", "<function=f>", *MARKS)


def test_random_calls_come_back():
    check_round_trips(Qwen3Coder, MARKS, render, quotes=QUOTES, rounds=300)


def test_many_tags_in_a_value_take_little_time():
    text = "</parameter>\n<parameter=z>\n" * 2000
    case = Case("tags", call("f", x=text + "."), [Call("f", json.dumps({"x": text + "."}))])
    check_case(Qwen3Coder, MARKS, case)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Qwen3Coder, MARKS, ends=["\n</parameter>\n"])
