"""Grammars that the server makes: what may follow the reasoning, and calls of tools."""

import json
from types import SimpleNamespace

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from mlx_lm.tool_parsers import json_tools

from mlx_paged.cli import load_model
from mlx_paged.server.constraints import after_reasoning, of_tools

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


def mark(tokenizer, text):
    """The attributes of mlx-lm's tokenizer about an end of reasoning."""
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
    added = tokenizer.get_added_vocab
    return SimpleNamespace(think_end=text, think_end_tokens=tokens, get_added_vocab=added)


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
    grammar = after_reasoning(mark(tokenizer, end), options)["grammar"]
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
    [("</t>", {"regex": "a"}), ("", {"grammar": 'start: "a"'}), ("", {"json_schema": SCHEMA})],
)
def test_what_cannot_follow_reasoning_is_refused(tokenizer, end, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected a prompt that does not"):
        after_reasoning(mark(tokenizer, end), options)


@pytest.mark.parametrize("reasons", [False, True])
def test_calls_are_in_the_models_format(tokenizer, reasons):
    named = SimpleNamespace(
        tool_parser=json_tools.parse_tool_call,
        tool_call_start=json_tools.tool_call_start,
        tool_call_start_tokens=None,
        tool_call_end=json_tools.tool_call_end,
        tool_call_end_tokens=tuple(tokenizer.encode("</tool_call>")),
    )
    tools = [{"function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
    options, before = of_tools(named, tools, None), ""
    if reasons:
        options, before = after_reasoning(mark(tokenizer, "</t>"), options), "Hm.</t>\n\n"

    def call(name, arguments='"a b"'):
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    for text in (call("g"), call("g") + "\n" + call("f", JSON_TEXTS[1])):
        assert accepts(tokenizer, options["grammar"], before + text)
    for text in ("", call("g")[:-1], call("h"), call("g", "2"), call("g") + "so"):
        assert not accepts(tokenizer, options["grammar"], before + text)
