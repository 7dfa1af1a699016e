"""JSON between tags: cases of the format, and random calls."""

import json

import pytest

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.json_tools import JsonTools
from mlx_paged.formats.parser import Begin
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import Case, Mark, check_case, check_round_trips, made

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
START, END, THINK, THOUGHT = map(Mark, MARKS)
F1 = '\n{"name": "f", "arguments": {"x":  "1"}}\n'
G1 = '\n{"name": "g", "arguments": {}}\n'
CALL_F, CALL_G = Call("f", '{"x":  "1"}'), Call("g", "{}")


def wrapped(*texts):
    return [part for text in texts for part in (START, text, END)]


def one(text):
    """A call whose arguments are a text of JSON."""
    return [START, f'{{"name": "f", "arguments": {text}}}', END]


CUT = {"is_cut": True}
CASES = [
    Case(
        "thought, text, call",
        [THINK, "Hm.", THOUGHT, "So: ", *wrapped(F1)],
        [Thought("Hm."), Text("So: "), CALL_F],
    ),
    Case("white space between calls", [*wrapped(F1), "\n\n", *wrapped(G1), "\n"], [CALL_F, CALL_G]),
    Case(
        "white space before a call",
        [THINK, "Hm", THOUGHT, "\n\n", *wrapped(F1)],
        [Thought("Hm"), CALL_F],
    ),
    Case(
        "text between calls",
        [*wrapped(F1), " so ", *wrapped(G1), " b"],
        [CALL_F, Text(" so "), CALL_G, Text(" b")],
    ),
    Case("two objects in tags", wrapped(F1 + G1), [CALL_F, CALL_G]),
    Case("a list in tags", wrapped(f"[{F1},{G1}]"), [CALL_F, CALL_G]),
    Case("cut in a call", ["a ", START, F1[:20]], [Text("a <tool_call>" + F1[:20])], CUT),
    Case(
        "cut before the end tag", [*wrapped(G1), START, F1], [CALL_G, Text("<tool_call>" + F1)], CUT
    ),
    Case("no end tag at the end", [START, F1], [CALL_F]),
    Case("no JSON", [START, "{x}", END, " b"], [Text("<tool_call>{x}</tool_call> b")]),
    Case("prose", ["Write ", START, " and JSON."], [Text("Write <tool_call> and JSON.")]),
    Case(
        "a name with a space",
        [START, '{"name": "f g", "arguments": {}}', END],
        [Text('<tool_call>{"name": "f g", "arguments": {}}</tool_call>')],
    ),
    Case(
        "no name",
        [START, '{"arguments": {}}', END],
        [Text('<tool_call>{"arguments": {}}</tool_call>')],
    ),
    Case("arguments are no object", one("[1]"), [Text("".join(one("[1]")))]),
    Case("NaN", one('{"x": NaN}'), [Text("".join(one('{"x": NaN}')))]),
    Case("beyond a double", one('{"x": 1e400}'), [Text("".join(one('{"x": 1e400}')))]),
    Case(
        "a large integer",
        one('{"n": 1234567890123456789012}'),
        [Call("f", '{"n": 1234567890123456789012}')],
    ),
    Case("an object in a string", one(json.dumps('{"x": 1}')), [Call("f", '{"x": 1}')]),
    Case(
        "tags in a string",
        one('{"x": "</tool_call><tool_call>"}'),
        [Call("f", '{"x": "</tool_call><tool_call>"}')],
    ),
    Case(
        "an end tag in a string",
        [START, '{"name": "f", "arguments": {"x": "a', END, 'b"}}', END],
        [Call("f", '{"x": "a</tool_call>b"}')],
    ),
    Case("no such tool", wrapped(G1.replace("g", "other")), [Call("other", "{}")]),
    Case(
        "a call after a broken one",
        [START, '{"name": "f', END, "\n", *wrapped(G1)],
        [Text('<tool_call>{"name": "f</tool_call>\n'), CALL_G],
    ),
    Case("no tools", wrapped(F1), [Text("".join(wrapped(F1)))], {"tools": []}),
    Case(
        "calls in a thought are thoughts",
        [THINK, "I ", *wrapped(F1), " so", THOUGHT, "a"],
        [Thought("I " + "".join(wrapped(F1)) + " so"), Text("a")],
    ),
    Case(
        "a thought that is not ended before a call",
        [THINK, "I ", *wrapped(F1), "\n", *wrapped(G1)],
        [Thought("I "), CALL_F, CALL_G],
    ),
    Case(
        "the same, cut",
        [THINK, "I ", *wrapped(F1), "\n"],
        [Thought("I " + "".join(wrapped(F1)) + "\n")],
        CUT,
    ),
    Case(
        "a thought begins the answer only",
        ["Tags: ", THINK, " ok ", THOUGHT],
        [Text("Tags: <think> ok </think>")],
    ),
    Case(
        "a tag in one piece of prose",
        "Tags: <think> ok",
        [Text("Tags: <think> ok")],
        {"vocabularies": ((),)},
    ),
    Case(
        "one thought",
        ["\n", THINK, "a", THOUGHT, "b", THINK, "c"],
        [Thought("a"), Text("b<think>c")],
    ),
    Case(
        "the prompt opens a thought",
        ["a", THOUGHT, "b"],
        [Thought("a"), Text("b")],
        {"begin": Begin.THOUGHT},
    ),
    Case("the prompt ends in content", [THINK, "a"], [Text("<think>a")], {"begin": Begin.CONTENT}),
    Case("data begins with a call", wrapped(F1), [CALL_F], {"is_data": True}),
    Case(
        "data",
        ['{"a": "', *wrapped(F1), '"}'],
        [Text('{"a": "' + "".join(wrapped(F1)) + '"}')],
        {"is_data": True},
    ),
    Case(
        "marks as text are no marks",
        "<think>a</think><tool_call>",
        [Text("<think>a</think><tool_call>")],
        {"vocabularies": (MARKS,)},
    ),
    Case("only white space", " \n", [Text(" \n")]),
    Case("the beginning of a mark", "a <tool_c", [Text("a <tool_c")]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(JsonTools, MARKS, case)


def test_text_is_told_as_soon_as_it_is_certain():
    """White space waits only where a call may follow."""
    form = made(JsonTools, (), None)
    assert form.parser([], Begin.START).feed(None, "\n") == [Text("\n")]
    parser = form.parser([{}], Begin.START)
    assert parser.feed(None, "\n") == [] and parser.feed(None, "a <t") == [Text("\na ")]
    assert parser.feed(None, "a") == [Text("<ta")]


def render(calls, rng):
    """As templates of Qwen 2.5 and 3 write calls."""
    is_ascii, wrappers = rng.random() < 0.5, []
    for name, arguments in calls:
        written = json.dumps(arguments, ensure_ascii=is_ascii)
        space = ["\n"] if wrappers else []
        wrappers.append([*space, START, f'\n{{"name": "{name}", "arguments": {written}}}\n', END])
    return wrappers


def test_random_calls_come_back():
    check_round_trips(JsonTools, MARKS, render, quotes=MARKS, rounds=300)


def test_what_the_grammar_allows_is_a_call():
    check_grammar(JsonTools, MARKS)
