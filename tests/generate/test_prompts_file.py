"""JSONL prompts: valid lines are parsed, wrong lines are reported."""

import json
from dataclasses import fields, replace

import pytest

from mlx_paged.generate.prompts_file import PromptSpec, read_prompts
from mlx_paged.sampling_params import SamplingParams

CHAT = '[{"role": "user", "content": "hi"}]'

BAD_LINES = {
    "not JSON": ("{'prompt': 'a'}", "not valid JSON"),
    "plain text": (
        "Why is the sky blue?",
        'not valid JSON at column 1: Expecting value: expected an object such as {"prompt": "..."}',
    ),
    "cut off": ('{"prompt": "a', "not valid JSON at column 14: Invalid control"),
    "no comma": ('{"prompt": "a" "n": 1}', "not valid JSON at column 16: Expecting ','"),
    "two objects": ('{"prompt": "a"} {"prompt": "b"}', "not valid JSON"),
    "nested too deep": ("[" * 100_000, "not valid JSON"),
    "a string": ('"a"', 'expected an object such as {"prompt": "..."}'),
    "a list": ('["a"]', 'expected an object such as {"prompt": "..."}'),
    "null": ("null", 'expected an object such as {"prompt": "..."}'),
    "neither": ('{"max_tokens": 3}', 'expected exactly one of "prompt" and "messages"'),
    "both": (
        f'{{"prompt": "a", "messages": {CHAT}}}',
        'expected exactly one of "prompt" and "messages"',
    ),
    "prompt is a number": ('{"prompt": 3}', '"prompt" must be a string'),
    "prompt is a list": ('{"prompt": ["a"]}', '"prompt" must be a string'),
    "messages are text": ('{"messages": "hi"}', '"messages" must be a list'),
    "no messages": ('{"messages": []}', '"messages" must be a list'),
    "message without role": ('{"messages": [{"content": "hi"}]}', '"messages" must be a list'),
    "message is text": ('{"messages": ["role"]}', '"messages" must be a list'),
    "unknown key": ('{"prompt": "a", "max_token": 3}', 'unknown key "max_token"'),
    "number as text": ('{"prompt": "a", "top_k": "3"}', "top_k is '3': expected an integer >= 0"),
    "number as truth": ('{"prompt": "a", "seed": true}', "seed is True: expected an integer"),
    "number is null": ('{"prompt": "a", "temp": null}', "temperature is None: expected >= 0"),
    "switch as number": ('{"prompt": "a", "speculate": 1}', "speculate is 1: expected True or"),
    "switch as text": ('{"prompt": "a", "ignore_eos": "no"}', "ignore_eos is 'no': expected True"),
    "n is text": ('{"prompt": "a", "n": "2"}', '"n" must be a whole number'),
    "n is none": ('{"prompt": "a", "n": 0}', '"n" must be at least 1'),
    "priority is a fraction": ('{"prompt": "a", "priority": 0.5}', '"priority" must be a whole'),
    "bias is a list": ('{"prompt": "a", "logit_bias": [5]}', '"logit_bias" must be an object'),
    "bias of a word": ('{"prompt": "a", "logit_bias": {"x": 1}}', '"logit_bias" must be an obj'),
    "stop is a number": ('{"prompt": "a", "stop": 3}', "stop is 3: expected a collection"),
    "stop holds a number": ('{"prompt": "a", "stop": ["x", 3]}', "stop is ('x', 3): expected non"),
    "stop tokens are text": ('{"prompt": "a", "stop_token_ids": ["<eos>"]}', "stop_token_ids is"),
    "schema is a number": ('{"prompt": "a", "json_schema": 3}', "json_schema is 3: expected None"),
    "two constraints": ('{"prompt": "a", "regex": "b", "grammar": "c"}', "regex and grammar are"),
    "a callable": ('{"prompt": "a", "sampler": "greedy"}', 'unknown key "sampler"'),
}


def read_one(line: str) -> PromptSpec:
    [spec] = read_prompts([line], "prompts.jsonl")
    return spec


def test_a_line_is_a_prompt():
    spec = read_one('{"prompt": "def main():\\n"}')
    assert spec.prompt == "def main():\n" and spec.messages is None
    assert spec.options == {} and spec.id is None


def test_a_line_may_be_a_chat():
    spec = read_one(f'{{"messages": {CHAT}}}')
    assert spec.prompt is None
    assert spec.messages == [{"role": "user", "content": "hi"}]


def test_a_line_may_switch_drafts_off_and_go_on_after_the_end():
    spec = read_one('{"prompt": "a", "speculate": false, "ignore_eos": true}')
    assert spec.options == {"speculate": False, "ignore_eos": True}


def test_options_are_named_as_in_sampling_params():
    spec = read_one(
        '{"prompt": "a", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4,'
        ' "min_p": 0.1, "seed": 7, "stop": ["x", "y"]}'
    )
    assert spec.options == {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["x", "y"],
    }


def test_a_line_may_ask_for_several_completions_and_for_precedence():
    spec = read_one('{"prompt": "a", "n": 3, "priority": -2, "logit_bias": {"7": -1.5}}')
    assert (spec.n, spec.priority, spec.options) == (3, -2, {"logit_bias": {7: -1.5}})


def test_temp_is_short_for_temperature():
    assert read_one('{"prompt": "a", "temp": 0.5}').options == {"temperature": 0.5}


def test_a_stop_string_may_stand_alone():
    options = read_one('{"prompt": "a", "stop": "end"}').options
    assert SamplingParams(**options).stop == ("end",)


def test_every_option_that_json_can_hold_is_a_key():
    callables = {"sampler", "logits_processors"}
    defaults = {each.name: each.default for each in fields(SamplingParams)}
    plain = {
        name: list(value) if isinstance(value, frozenset | tuple) else value
        for name, value in defaults.items()
        if name not in callables | {"logit_bias"}
    }
    options = read_one(json.dumps({"prompt": "a", "logit_bias": {}, **plain})).options
    assert options.keys() == defaults.keys() - callables
    assert SamplingParams(**options) == SamplingParams()


@pytest.mark.parametrize("key", ["regex", "grammar", "json_schema"])
def test_a_constraint_replaces_that_of_the_command_line(key):
    given = SamplingParams(json_schema='{"type": "integer"}')
    options = read_one(json.dumps({"prompt": "a", key: "[0-9]+"})).options
    assert replace(given, **options).constraint == (key, "[0-9]+")


@pytest.mark.parametrize("value", ["7", '"seven"', '["x", 7]'], ids=["number", "text", "list"])
def test_any_id_comes_along(value):
    assert read_one(f'{{"prompt": "a", "id": {value}}}').id in (7, "seven", ["x", 7])


def test_lines_keep_their_order_and_number():
    lines = ['{"prompt": "a"}\n', "\n", "   \n", '{"prompt": "b"}\n', '{"prompt": "c"}']
    specs = read_prompts(lines, "prompts.jsonl")
    assert [spec.prompt for spec in specs] == ["a", "b", "c"]
    assert [spec.source for spec in specs] == [f"prompts.jsonl line {n}" for n in (1, 4, 5)]


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_reported_with_file_and_number(line, message):
    with pytest.raises(ValueError) as error:
        read_prompts(['{"prompt": "fine"}\n', "\n", line + "\n"], "prompts.jsonl")
    assert str(error.value).startswith(f"prompts.jsonl line 3: {message}")


def test_an_unknown_key_is_told_which_ones_exist():
    with pytest.raises(ValueError, match="expected one of max_tokens, temperature, top_p, top_k"):
        read_one('{"prompt": "a", "best_of": 3}')


@pytest.mark.parametrize("lines", [[], ["\n", "  \n"]], ids=["no lines", "blank lines"])
def test_a_file_without_prompts_is_a_mistake(lines):
    with pytest.raises(ValueError, match=r"^prompts\.jsonl: no prompts in it"):
        read_prompts(lines, "prompts.jsonl")


@pytest.mark.parametrize(
    ("spec", "title"),
    [
        (PromptSpec("def main():\n\treturn"), "def main(): return"),
        (
            PromptSpec(
                None, [{"role": "system", "content": "x"}, {"role": "user", "content": "a\nb"}]
            ),
            "a b",
        ),
        (PromptSpec(None, [{"role": "user"}]), ""),
    ],
    ids=["prompt", "last message", "message without content"],
)
def test_the_title_is_one_line(spec, title):
    assert spec.title == title


def test_a_line_may_be_of_the_background():
    (spec,) = read_prompts(['{"prompt": "a", "priority": "background"}'], "f")
    assert spec.priority == "background"
    for value in ('"low"', '["background"]', "true", "1.5"):
        with pytest.raises(ValueError, match=r'must be a whole number or "background"'):
            read_prompts([f'{{"prompt": "a", "priority": {value}}}'], "f")
