"""A choice finds text, reasoning and tool calls, whatever the pieces of text are."""

import json
import re
from types import SimpleNamespace

import pytest

from mlx_paged.formats.json_tools import JsonTools
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.thoughts import Thoughts
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.protocol.choices import CompletionChoice
from mlx_paged.protocol.deltas import Delta
from mlx_paged.protocol.prompts import Prompt
from mlx_paged.request import FinishReason

FORMAT = JsonTools(Marks({}), Thoughts("<think>", "</think>"))


def call(name, a):
    return json.dumps({"name": name, "arguments": {"a": a}})


def ended(reason):
    return Completion(0, 1, [], "", [], reason, None, 0.0, 0, 0)


def read(text, width, begin=Begin.START, reason=FinishReason.STOP, **options):
    """The sum of all deltas of a text whose tokens have `width` characters; an end token follows
    if it ends by itself."""
    pieces = [text[i : i + width] for i in range(0, len(text), width)]
    pieces += [""] * (reason == FinishReason.STOP)
    names = [piece or "<end>" for piece in pieces]
    tokenizer = SimpleNamespace(decode=lambda tokens: names[tokens[0]])
    model = SimpleNamespace(tokenizer=tokenizer, format=FORMAT)
    fields = {"messages": [], "tools": [{}], "stream": True, "stop": [], "min_tokens": 0}
    fields |= {"logprobs": False, "max_tokens": 9} | options
    choice = CompletionChoice(0, model, fields, Prompt([1], "", begin))
    whole = Delta()
    for i, piece in enumerate(pieces):
        assert choice.finish_reason is None
        last = ended(reason) if i == len(pieces) - 1 else None
        whole.add(choice.add(TokenOutput(0, i, piece, 0.0, completion=last)))
    return whole, choice.finish_reason


def calls_of(delta):
    return [
        (c["index"], c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in delta.tool_calls
    ]


def parts_of(delta):
    """Kind and text of each part; of a call the name of its function."""
    return [(p.kind, p.call["function"]["name"] if p.call else p.text) for p in delta.parts]


@pytest.mark.parametrize("width", [1, 3, 7, 1000])
@pytest.mark.parametrize("stop", [[], ["xy"], ["b <"]])
def test_parts_keep_their_order(width, stop):
    """Also text that was held back because a stop string might begin there."""
    f, g = (f"<tool_call>{call(name, 1)}</tool_call>" for name in "fg")
    text = f"<think>cx</think>ax{f}b {g}xb {f}{g}ex"
    assert parts_of(read(text, width, stop=stop)[0]) == [
        *(("reasoning", "cx"), ("text", "ax"), ("tool_call", "f"), ("text", "b ")),
        *(("tool_call", "g"), ("text", "xb "), ("tool_call", "f"), ("tool_call", "g")),
        ("text", "ex"),
    ]


@pytest.mark.parametrize("width", [1, 2, 5, 7])
def test_a_text_has_the_log_probabilities_of_its_tokens(width):
    """A thought and a call have none. Each token counts once, in the order of the tokens."""
    text = f"<think>Hm.</think>{'ab' * 8}<tool_call>{call('f', 1)}</tool_call>{'cd' * 8}"
    delta, _ = read(text, width, logprobs=True)
    count = -(-len(text) // width)
    assert [entry["id"] for entry in delta.logprobs] == [*range(count + 1)]
    found = []
    for part in delta.parts:
        assert bool(part.logprobs) == (part.kind == "text")
        ids = [entry["id"] for entry in part.logprobs]
        found += ids
        if part.kind == "text":
            start, end = (text.index(part.text) + shift for shift in (0, len(part.text) - 1))
            assert {*range(-(-start // width), end // width + 1)} <= {*ids}
            assert {*range(start // width, end // width + 1)} >= {*ids}
    assert found == sorted(set(found))


MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CALLED = f"<tool_call>{call('f', 1)}</tool_call>"


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("abc", {}, ["abc"]),
        ("<think>yes</think>yes", {}, ["yes"]),
        ("<think></think>\n\nyes", {}, ["\n\nyes"]),
        ("  <think>a</think>b<think>", {}, ["b<think>"]),
        (f"yes{CALLED}yes", {}, ["yes", "yes"]),
        (f"\n{CALLED}\n {CALLED}\n", {}, []),
        (f"a\n{CALLED}\n b", {}, ["a\n", "\n b"]),
        ("abcENDe", {"stop": ["END"]}, ["abc"]),
        ("EEENDe", {"stop": ["END"]}, ["EE"]),
        ("a EN", {"stop": ["END"]}, ["a EN"]),
        (f"aE{CALLED}ND", {"stop": ["END"]}, ["aE", "ND"]),
        ("END a END b", {"stop": ["END"], "min_tokens": 3}, ["END a "]),
        ("<<<thi", {}, ["<<<thi"]),
        ("<t<think></think>", {}, ["<t<think></think>"]),
        ("ab<tool_call>no JSON</tool_call>", {}, ["ab<tool_call>no JSON</tool_call>"]),
        (f"<tool_call>{{<tool_call>{CALLED}b", {}, ["<tool_call>{<tool_call>", "b"]),
        (f"yes{CALLED}yes", {"reason": FinishReason.LENGTH}, ["yes", "yes"]),
        (f"yes{CALLED[:-20]}", {"reason": FinishReason.LENGTH}, ["yes" + CALLED[:-20]]),
    ],
)
def test_the_tokens_of_log_probabilities_join_to_the_text(text, options, expected, has_tokens):
    """Of a mark, a thought, a call, a stop string and the end token there is none."""
    parts = marked(text, has_tokens, **options)
    assert [part.text for part in parts if part.kind == "text"] == expected
    for part in parts:
        joined = "".join(entry["token"] for entry in part.logprobs)
        assert joined == (part.text if part.kind == "text" else "")


def marked(text, has_tokens, reason=FinishReason.STOP, **options):
    """The parts of a text whose tokens are characters, and marks if these are tokens."""
    marks = Marks({mark: i for i, mark in enumerate(MARKS)} if has_tokens else {})
    tokens = re.findall("|".join(MARKS) + r"|(?s:.)", text) if has_tokens else list(text)
    names = {i: mark for i, mark in enumerate(MARKS)} | {ord(x): x for x in tokens if len(x) == 1}
    ids = {name: i for i, name in names.items()}
    model = SimpleNamespace(
        tokenizer=SimpleNamespace(decode=lambda tokens: names.get(tokens[0], "<end>")),
        format=JsonTools(marks, Thoughts("<think>", "</think>")),
    )
    fields = {"messages": [], "tools": [{}], "stream": True, "stop": [], "min_tokens": 0}
    fields |= {"logprobs": True, "max_tokens": 9} | options
    choice, whole = CompletionChoice(0, model, fields, Prompt([1], "")), Delta()
    told = [*((ids[name], name) for name in tokens), *[(-1, "")] * (reason == FinishReason.STOP)]
    for i, (token, piece) in enumerate(told):
        last = ended(reason) if i == len(told) - 1 else None
        whole.add(choice.add(TokenOutput(0, token, piece, 0.0, completion=last)))
    return whole.parts


def test_a_part_of_a_character_belongs_to_its_text():
    """The detokenizer tells a character with its last token; the end token tells what is left."""
    model = SimpleNamespace(
        tokenizer=SimpleNamespace(decode=lambda tokens: "\ufffd" if tokens[0] < 9 else "x"),
        format=JsonTools(Marks({"</think>": 9}), Thoughts("<think>", "</think>")),
    )
    fields = {"messages": [], "tools": [], "stream": True, "stop": [], "min_tokens": 0}
    fields |= {"logprobs": True, "max_tokens": 9}
    told = [(1, ""), (9, "\ufffd</think>"), (2, ""), (3, "é"), (10, "x"), (4, ""), (11, "\ufffd")]
    choice = CompletionChoice(0, model, fields, Prompt([1], "", Begin.THOUGHT))
    whole = Delta()
    for i, (token, piece) in enumerate(told):
        last = ended(FinishReason.STOP) if i == len(told) - 1 else None
        whole.add(choice.add(TokenOutput(0, token, piece, 0.0, completion=last)))
    thought, text = whole.parts
    assert (thought.text, thought.logprobs, text.text) == ("\ufffd", [], "éx\ufffd")
    assert [entry["id"] for entry in text.logprobs] == [2, 3, 10, 4]


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_reasoning_text_and_tool_calls_are_told_apart(width):
    calls = f"<tool_call>{call('f', 1)}</tool_call><tool_call>{call('g', 2)}</tool_call>"
    text = f"<think>Hm.</think>Well: {calls} so"
    delta, reason = read(text, width)
    assert (delta.reasoning, delta.text, reason) == ("Hm.", "Well:  so", "tool_calls")
    assert calls_of(delta) == [(0, "f", {"a": 1}), (1, "g", {"a": 2})]


@pytest.mark.parametrize("width", [1, 1000])
def test_a_prompt_may_leave_the_model_reasoning(width):
    delta, reason = read(f"so<tool_call>{call('f', 1)}</tool_call>", width, begin=Begin.THOUGHT)
    assert (delta.reasoning, delta.text, reason) == ("so", "", "tool_calls")
    assert len(delta.tool_calls) == 1


@pytest.mark.parametrize("width", [1, 1000])
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_text_that_only_begins_a_marker_is_not_lost_at_the_end(width, reason):
    delta, found = read("a <thi", width, reason=reason)
    assert (delta.text, found) == ("a <thi", str(reason))


@pytest.mark.parametrize("width", [1, 1000])
def test_a_tool_call_that_the_end_cuts_off_counts_if_it_is_whole(width):
    delta, reason = read(f"<tool_call>{call('f', 1)}", width)
    assert calls_of(delta) == [(0, "f", {"a": 1})] and reason == "tool_calls"
    delta, reason = read('<tool_call>{"name"', width, reason=FinishReason.LENGTH)
    assert (delta.text, reason) == ('<tool_call>{"name"', "length")


@pytest.mark.parametrize("width", [1, 1000])
@pytest.mark.parametrize(
    "broken", ["no JSON", "[]", '{"arguments": {}}', '{"name": 1, "arguments": 1}']
)
def test_the_text_of_a_malformed_call_is_delivered(width, broken):
    text = f"a <tool_call>{broken}</tool_call> b <tool_call>{call('f', 1)}</tool_call>"
    delta, reason = read(text, width)
    assert delta.text == f"a <tool_call>{broken}</tool_call> b " and reason == "tool_calls"
    assert calls_of(delta) == [(0, "f", {"a": 1})]
    delta, reason = read(f"<tool_call>{broken}</tool_call>", width)
    assert (delta.text, delta.tool_calls, reason) == (
        f"<tool_call>{broken}</tool_call>",
        [],
        "stop",
    )


@pytest.mark.parametrize("width", [1, 1000])
def test_a_stop_string_counts_in_the_text_only(width):
    text = f"<think>END</think>so<tool_call>{call('END', 1)}</tool_call> a END b"
    delta, reason = read(text, width, stop=["END"])
    assert (delta.reasoning, delta.text) == ("END", "so a ")
    assert calls_of(delta) == [(0, "END", {"a": 1})] and reason == "tool_calls"
    assert read("a EN", width, stop=["END"])[0].text == "a EN"
    delta, reason = read("a END b", width, stop=["END"])
    assert (parts_of(delta), reason) == ([("text", "a ")], "stop")


def test_a_stop_string_counts_after_so_many_tokens():
    delta, reason = read("END a END b", 4, stop=["END"], min_tokens=1)
    assert (parts_of(delta), reason) == ([("text", "END a ")], "stop")


@pytest.mark.parametrize("width", [1, 1000])
def test_one_call_ends_the_choice_if_no_more_may_come(width):
    text = f"a<tool_call>{call('f', 1)}</tool_call><tool_call>{call('g', 2)}</tool_call>b"
    delta, reason = read(text, width, parallel_tool_calls=False)
    assert (delta.text, calls_of(delta), reason) == ("a", [(0, "f", {"a": 1})], "tool_calls")
