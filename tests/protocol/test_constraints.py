"""Grammars that the server makes: what may follow the reasoning, and calls of tools."""

import json

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from mlx_paged.formats.format import Format
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.registry import named
from mlx_paged.formats.thoughts import Thoughts
from mlx_paged.loading import load_model
from mlx_paged.protocol.constraints import NOTHING, leaves_calls, of_answer, of_tools

SCHEMA = {"enum": ["a b", {"k": [1, "}"]}]}
JSON_TEXTS = ['"a b"', '{"k": [1, "}"]}']
OTHERS = [
    ({"json_schema": SCHEMA}, JSON_TEXTS, ['"a"', '{"k":1}']),
    ({"json_schema": json.dumps(SCHEMA)}, JSON_TEXTS, ["no"]),
    ({"grammar": 'start: "x" start | "}"'}, ["}", "xx}"], ["x</t>", "y"]),
    ({"grammar": "// {\nNAME: /[a-c]{2}/\nstart: thought\nthought: NAME"}, ["ab"], ["a}", "abc"]),
    ({"grammar": 'answer: "{" "}"\nstart: answer\n%ignore / +/'}, ["{}", "{ }"], ["{ x"]),
    ({"grammar": 'start: %json {"enum": ["{"]}'}, ['"{"'], ["{"]),
]


@pytest.fixture(scope="module")
def tokenizer():
    """The demo model's, with marks of reasoning: a special token, another one, and plain text."""
    tokenizer = load_model()[1]
    inner = tokenizer._tokenizer
    inner.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|sep|>"]})
    inner.add_tokens(["</t>"])
    return tokenizer


def thinks(tokenizer, end):
    """A format whose thoughts have this end; none if it is empty."""
    marks = Marks(tokenizer.get_vocab())
    for token in ("<|end|>", "<|sep|>"):
        marks.code(token)
    return Format(marks, Thoughts("<t>", end) if end else None)


def either(form, options):
    """A call of a tool, or else a text that follows `options`."""
    return of_answer(form, Begin.START, options, of_tools(form, TOOLS, None))


def after(form, options):
    """What follows a thought."""
    return of_answer(form, Begin.THOUGHT, options, NOTHING)


def accepts(tokenizer, grammar, text):
    """Whether a text, which the model encodes as its tokenizer does, follows a grammar."""
    known = from_tokenizer(tokenizer._tokenizer, None, sorted(tokenizer.eos_token_ids))
    matcher = LLMatcher(known, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.sampled(24)
@pytest.mark.parametrize("end", ["<|end|>", "</t>", "</think>", "<|end|>so<|sep|>"])
@pytest.mark.parametrize(("options", "right", "wrong"), OTHERS, ids=lambda v: str(v)[:40])
def test_the_answer_follows_the_reasoning(tokenizer, end, options, right, wrong):
    grammar = after(thinks(tokenizer, end), options)["grammar"]
    for thought in ("", "Hm {\n<|e </ so"):
        for text in right:
            assert accepts(tokenizer, grammar, f"{thought}{end}{text}")
            assert accepts(tokenizer, grammar, f"{thought}{end}\n\n{text}")
            assert not accepts(tokenizer, grammar, f"{thought}{end}{' ' * 5}{text}")
            assert not accepts(tokenizer, grammar, f"{thought}{text}")
        for text in wrong:
            assert not accepts(tokenizer, grammar, f"{thought}{end}{text}")
    assert not accepts(tokenizer, grammar, f"Hm{end}no{end}{right[0]}")


@pytest.mark.parametrize(
    ("end", "options"),
    [("</t>", {"regex": "a"}), ("</think>", {"regex": "a"})],
)
def test_what_cannot_follow_reasoning_is_refused(tokenizer, end, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected a prompt that does not"):
        after(thinks(tokenizer, end), options)


TOOLS = [{"function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]


def of_format(tokenizer, name):
    return named(name)(Marks(tokenizer.get_vocab()), None)


def called(form, *names, arguments='"a b"'):
    """The text of calls in a format."""
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name in names]
    if form == "mistral":
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    tag = {"json_tools": "tool_call", "longcat": "longcat_tool_call"}[form]
    return "\n".join(f"<{tag}>\n{each}\n</{tag}>" for each in objects)


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("name", ["json_tools", "longcat", "mistral"])
def test_calls_are_in_the_models_format(tokenizer, name, reasons):
    options, before = of_tools(of_format(tokenizer, name), TOOLS, None), ""
    if reasons:
        options, before = after(thinks(tokenizer, "</t>"), options), "Hm.</t>\n\n"
    for text in (called(name, "g"), called(name, "g", "f", "g", arguments=JSON_TEXTS[1])):
        assert accepts(tokenizer, options["grammar"], before + text)
    good = called(name, "g")
    for text in (
        "",
        good[:-1],
        called(name, "h"),
        called(name, "g", arguments="2"),
        f"{good}s",
    ):
        assert not accepts(tokenizer, options["grammar"], before + text)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("end", [None, "<|end|>", "</t>", "</think>"])
@pytest.mark.parametrize(("options", "right", "wrong"), OTHERS, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("name", ["json_tools", "longcat", "mistral"])
def test_a_call_or_an_answer(tokenizer, name, options, right, wrong, end):
    model = of_format(tokenizer, name)
    assert leaves_calls(model, options)
    options, before = either(model, options), ""
    if end is not None:
        options, before = after(thinks(tokenizer, end), options), f"Hm {{{end}\n"
    grammar = options["grammar"]
    calls = [called(name, "f"), called(name, "g", "f")]
    for text in (*right, *calls):
        assert accepts(tokenizer, grammar, before + text)
    mixed = [calls[0] + right[0], right[0] + calls[0], "so " + calls[0], "so " + right[0]]
    for text in (*wrong, *mixed, "", calls[0][:-1], called(name, "h")):
        assert not accepts(tokenizer, grammar, before + text)


def test_a_schema_that_begins_as_a_call_does(tokenizer):
    """The calls of mistral have a list, too."""
    schema = {"type": "array", "items": {"type": "integer"}}
    model = of_format(tokenizer, "mistral")
    grammar = either(model, {"json_schema": schema})["grammar"]
    for text in ("[1, 2]", "[]", called("mistral", "f")):
        assert accepts(tokenizer, grammar, text)
    assert not accepts(tokenizer, grammar, "[TOOL")


def test_what_leaves_no_calls(tokenizer):
    assert not leaves_calls(of_format(tokenizer, "json_tools"), {"regex": "a"})
    assert not leaves_calls(thinks(tokenizer, None), {"json_schema": SCHEMA})
