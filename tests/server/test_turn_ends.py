"""Where the next prompts of a chat depart from its prompt."""

from functools import partial

import pytest

from mlx_paged import Engine
from mlx_paged.protocol.turn_ends import turn_ends
from tests.support.commands.server_harness import TEMPLATE, demo, live, only_model, post

SYSTEM = {"role": "system", "content": "def rules():\n    return 'be brief'"}
TASK = {"role": "user", "content": "import os\nclass Task:"}
CALL = {"role": "assistant", "content": "run()", "thought": "I must run it."}
RESULT = {"role": "tool", "content": "\n".join(f"line {n} of a file" for n in range(30))}
NEXT = {"role": "user", "content": "And then?"}
WITHOUT_THOUGHTS = (
    "{% set found = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set found.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]\n"
    "{% if m.role == 'assistant' and loop.index0 > found.last %}<think>{{ m.thought }}</think>"
    "{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n<think>{% endif %}"
)


def ends_of(messages, template=WITHOUT_THOUGHTS) -> tuple[list[str], str]:
    """The texts of the beginnings that are found, and the prompt's text."""
    tokenizer = demo()[1]
    render = partial(tokenizer.apply_chat_template, chat_template=template, tokenize=False)
    text = render(messages, add_generation_prompt=True)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    ends = turn_ends(tokenizer, render, messages, text, tokens)
    return [tokenizer.decode(tokens[:end]) for end in ends], text


def test_before_a_new_question_and_before_what_its_answer_thinks():
    for before in ([SYSTEM], [SYSTEM, TASK, CALL, RESULT, CALL]):
        found, text = ends_of([*before, NEXT])
        at = text.rindex(NEXT["content"])
        assert found == [text[:at], text.removesuffix("<think>")]


def test_while_tools_are_called_at_the_end():
    found, text = ends_of([SYSTEM, TASK, CALL, RESULT])
    assert found == [text]  # thoughts since the question are kept


def test_a_template_that_fails_for_other_chats_finds_none():
    template = "{% if '·' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}"
    assert ends_of([SYSTEM, TASK], template + WITHOUT_THOUGHTS)[0] == []


@pytest.mark.parametrize("content", ["·", "··", "", "\n", "· more"])
def test_a_question_like_the_one_that_is_tried(content):
    found, text = ends_of([SYSTEM, {"role": "user", "content": content}])
    assert all(text.startswith(each) for each in found) and found


def test_the_server_finds_them_for_models_with_states(monkeypatch):
    seen, add = list[tuple[int, ...]](), Engine.add_samples

    def noted(engine, *args, turn_ends=(), **options):
        seen.append(turn_ends)
        return add(engine, *args, turn_ends=turn_ends, **options)

    monkeypatch.setattr(Engine, "add_samples", noted)
    body = {"messages": [{"role": "user", "content": "import"}], "max_tokens": 2}
    with live("--chat-template", TEMPLATE) as server:
        for has_states in (only_model(server).has_states, True):
            only_model(server).has_states = has_states
            _, _, answer = post(server, body, "/v1/chat/completions")
    num_prompt = answer["usage"]["prompt_tokens"]
    assert seen[0] == () and len(seen[1]) == 2 and 0 < seen[1][0] < seen[1][1] == num_prompt
