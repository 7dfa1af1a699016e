"""DSML of DeepSeek V3.2 and V4: cases of the formats, and random calls."""

import json
from types import SimpleNamespace

import pytest
from mlx_lm.chat_templates.deepseek_v32 import apply_chat_template

from mlx_paged.formats.begins import begin_of
from mlx_paged.formats.choice import chosen, events_of
from mlx_paged.formats.deepseek_dsml import DeepSeekV4, DeepSeekV32
from mlx_paged.formats.events import Call, Text, Thought
from mlx_paged.formats.parser import Begin
from tests.support.formats.grammars import check_grammar
from tests.support.formats.harness import TOOLS, Case, Mark, check_case, check_round_trips

MARKS = ("｜DSML｜",)
DSML = Mark(MARKS[0])
WRAPPERS = {DeepSeekV32: "function_calls", DeepSeekV4: "tool_calls"}


def tag(name, slash=""):
    return [f"<{slash}", DSML, f"{name}>"]


def parameter(key, value, told=None):
    told = json.dumps(isinstance(value, str)) if told is None else told
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    opened = f'parameter name="{key}" string="{told}"'
    return [*tag(opened), text, *tag("parameter", "/")]


def invoke(name, *parameters):
    """As DeepSeek's encoding of messages writes a call."""
    inner = [part for each in parameters for part in (*each, "\n")]
    return [*tag(f'invoke name="{name}"'), "\n", *inner, *tag("invoke", "/")]


def wrapped(*invokes, outer="function_calls"):
    inner = [part for each in invokes for part in (*each, "\n")]
    return [*tag(outer), "\n", *inner, *tag(outer, "/")]


def as_text(parts):
    return [Text("".join(parts))]


CODE = "\n    return '</parameter>' </｜ \n"
QUOTED = "a</｜DSML｜parameter>b"
BOTH = wrapped(invoke("f", parameter("x", CODE), parameter("n", 2)), invoke("g"))
CALL_F = Call("f", json.dumps({"x": CODE, "n": 2}, ensure_ascii=False))
CUT = [*wrapped(invoke("f", parameter("x", CODE), parameter("n", 2)))[:-3], "<", DSML, "inv"]
CASES = [
    Case("two calls", ["a\n\n", *BOTH], [Text("a\n\n"), CALL_F, Call("g", "{}")]),
    Case(
        "behind a thought",
        ["<think>a</think>", *BOTH],
        [Thought("a"), CALL_F, Call("g", "{}")],
        {"vocabularies": ((),)},
    ),
    Case(
        "a text that is a number stays a text",
        wrapped(invoke("f", parameter("n", "5"))),
        [Call("f", '{"n": "5"}')],
    ),
    Case(
        "a number in the place of a text stays a number",
        wrapped(invoke("f", parameter("x", 12345678901234567890))),
        [Call("f", '{"x": 12345678901234567890}')],
    ),
    Case("null", wrapped(invoke("f", parameter("x", None))), [Call("f", '{"x": null}')]),
    Case(
        "no JSON", wrapped(invoke("f", parameter("n", "NaN", "false"))), [Call("f", '{"n": "NaN"}')]
    ),
    Case(
        "a tag that tells no type",
        wrapped(invoke("f", [*tag('parameter name="n"'), "5", *tag("parameter", "/")])),
        [Call("f", '{"n": 5}')],
    ),
    Case("no such function", wrapped(invoke("h", parameter("z", 1))), [Call("h", '{"z": 1}')]),
    Case(
        "the end of a value in a value",
        wrapped(invoke("f", parameter("x", QUOTED))),
        [Call("f", json.dumps({"x": QUOTED}, ensure_ascii=False))],
    ),
    Case("no invoke", wrapped(["so"]), as_text(wrapped(["so"]))),
    Case("a name with a space", wrapped(invoke("f g")), as_text(wrapped(invoke("f g")))),
    Case(
        "cut in the second call",
        CUT,
        [CALL_F, Text("\n<｜DSML｜inv")],
        {"is_cut": True},
    ),
    Case("cut in a value", BOTH[:9], as_text(BOTH[:9]), {"is_cut": True}),
    Case("marks as text", "".join(BOTH), as_text(BOTH), {"vocabularies": (MARKS,)}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case):
    check_case(DeepSeekV32, MARKS, case)


def published():
    """What formats see of a tokenizer with mlx-lm's template of DeepSeek V3.2."""
    return SimpleNamespace(
        chat_template=None,
        has_chat_template=True,
        get_vocab=lambda: {"<think>": 0, "</think>": 1, MARKS[0]: 2, "<｜end▁of▁sentence｜>": 3},
        apply_chat_template=lambda messages, tokenize, **options: apply_chat_template(
            messages, **options
        ),
        name_or_path="/nowhere",
        eos_token_ids=(3,),
        decode=lambda tokens: "<｜end▁of▁sentence｜>",
        tool_parser=None,
    )


HI = {"role": "user", "content": "Say <think>."}
TURNS = [
    HI,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": CODE, "n": 2}}}],
    },
    {"role": "tool", "content": "<think>"},
]


def test_the_published_template_shows_tools_and_calls():
    """It writes tools only into a turn of the system, and takes arguments as text."""
    found = chosen(published())
    assert (found.format.name, found.problem) == ("deepseek_v32", None)
    for chat in (TURNS, [{"role": "system", "content": "Be."}, *TURNS]):
        history = found.format.history(chat, True)
        text = apply_chat_template(history, tools=found.format.declared(TOOLS))
        assert text.count('"name": "f"') == 1 and ("Be." in text) == (len(chat) == 4)
        *_, called = [e for e in events_of(found.format, text, TOOLS) if isinstance(e, Call)]
        assert called == CALL_F


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("chat", [TURNS, TURNS[:1]], ids=["a result", "a user"])
def test_the_published_template_may_open_a_thought(chat, thinks):
    form = chosen(published()).format

    def alone(messages):
        turns = form.history([*messages])
        return apply_chat_template(turns, enable_thinking=thinks, add_generation_prompt=False)

    turns = form.history(chat)
    prompt = apply_chat_template(turns, enable_thinking=thinks, add_generation_prompt=True)
    begin = begin_of(form, chat, prompt, alone, adds_prompt=True, continues=False)
    assert begin == (Begin.THOUGHT if thinks else Begin.START)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_random_calls_come_back(kind):
    def render(calls, rng):
        invokes = [
            invoke(name, *(parameter(key, value) for key, value in arguments.items()))
            for name, arguments in calls
        ]
        return [wrapped(*invokes, outer=WRAPPERS[kind])]

    quotes = ("</｜DSML｜parameter>", "</｜DSML｜invoke>", "</parameter>", "</", "<｜DSML｜")
    check_round_trips(kind, MARKS, render, quotes=quotes, rounds=200, shares=True)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_the_grammar_allows_is_a_call(kind):
    check_grammar(kind, MARKS, ends=["</", "</｜DSML｜parameter>\n"])
