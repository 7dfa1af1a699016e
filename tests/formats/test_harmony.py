"""OpenAI's Harmony: cases of the format, and random calls."""

import json

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.harmony import Harmony
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.parser import Begin
from tests.support.formats.grammars import FUNCTIONS, check_grammar, tokenizer
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
    Case(
        "a mark in a recipient",
        [CHANNEL, "commentary to=functions.f", END, "g", MESSAGE, "{}", CALL],
        [Text("{}")],
        {"vocabularies": (MARKS,)},
    ),
    Case(
        "a header without an end",
        [CHANNEL, "final" + "!" * 1000],
        [Text("<|channel|>final" + "!" * 1000)],
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


def test_what_the_grammar_allows_is_a_call():
    check_grammar(Harmony, MARKS)


SAY = {"role": "user", "content": "hi"}


def used(name, own_id):
    return {"id": own_id, "type": "function", "function": {"name": name, "arguments": {}}}


def test_earlier_turns_are_as_the_template_takes_them():
    """It takes one call in a turn, no content beside it, and thoughts under their own name."""
    a, b = used("f", "a"), used("g", "b")
    results = [{"role": "tool", "tool_call_id": i, "content": i} for i in "ba"]
    turn = {"role": "assistant", "content": "Hm.", "reasoning_content": "So."}
    said = {"role": "assistant", "content": "Hm."}
    form = made(Harmony, MARKS)
    assert form.history([SAY, turn | {"tool_calls": []}, SAY]) == [
        SAY,
        said | {"thinking": "So."},
        SAY,
    ]
    called = [SAY, turn | {"tool_calls": [a, b]}, *results]
    second = [said | {"content": "", "tool_calls": [b]}, results[0]]
    assert form.history(called) == [
        SAY,
        {"role": "assistant", "thinking": "So.\n\nHm.", "content": "", "tool_calls": [a]},
        results[1],
        *second,
    ]
    assert form.history([*called, said]) == [
        SAY,
        said,
        {"role": "assistant", "thinking": "So.", "content": "", "tool_calls": [a]},
        results[1],
        *second,
        said,
    ]


@pytest.mark.parametrize("name", ["thinking", "reasoning_content", "reasoning"])
def test_a_thought_has_one_name(name):
    none = dict.fromkeys(["thinking", "reasoning_content", "reasoning"])
    turn = {"role": "assistant", "content": "a"}
    (found,) = made(Harmony, MARKS).history([turn | none | {name: "So."}])
    assert found == turn | {"thinking": "So."}


def test_instructions_are_one_turn():
    """The template leaves out those of later turns."""
    first, second = ({"role": "system", "content": text} for text in "ab")
    form = made(Harmony, MARKS)
    assert form.history([first, SAY]) == [first, SAY]
    both = {"role": "system", "content": "a\n\nb"}
    assert form.history([first, SAY, {"role": "developer", "content": "b"}]) == [both, SAY]
    assert form.history([SAY, second, SAY]) == [second, SAY, SAY]


def test_functions_have_descriptions():
    """The template takes no function without one."""
    bare, told = ({"function": {"name": "f"} | own} for own in ({}, {"description": "F."}))
    assert made(Harmony, MARKS).declared([bare, told]) == [
        {"function": {"name": "f", "description": ""}},
        told,
    ]


THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
YES = "<|channel|>final<|message|>yes"
CALL_F = "<|channel|>commentary to=functions.second <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(
    ("begin", "right", "wrong"),
    [
        (Begin.START, [YES, THINK + YES, THINK + THINK + YES, CALL_F], ["yes", YES + YES, THINK]),
        (Begin.THOUGHT, ["Hm.<|end|><|start|>assistant" + YES], [YES, "Hm.<|end|>yes"]),
        (Begin.CONTENT, ["yes"], [YES]),
    ],
)
def test_a_grammar_holds_for_the_final_channel_only(begin, right, wrong):
    inner = tokenizer(MARKS)
    form = Harmony(Marks(inner.get_vocab()), None)
    parts = ["content"] if begin == Begin.CONTENT else ["content", "calls"]
    rules = form.around(begin, parts) or ["start: content"]
    rules += ['content: "yes"']
    if begin != Begin.CONTENT:
        rules += form.rules(FUNCTIONS[1:], False)
    known = from_tokenizer(inner, None)
    for texts, is_right in ((right, True), (wrong, False)):
        for text in texts:
            matcher = LLMatcher(known, LLMatcher.grammar_from_lark("\n".join(rules)), log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            tokens = inner.encode(text, add_special_tokens=False)
            whole = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            assert whole == is_right, text
