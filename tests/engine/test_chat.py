"""Engine.chat: messages in; text, thoughts and tool calls out."""

import copy
import json

import mlx.core as mx
import pytest

from mlx_paged import Engine, SamplingParams, ToolCall
from mlx_paged.loading import load_model

TEMPLATE = """{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}
{% endfor %}<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>
{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\
{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>
{% endif %}{% endif %}{# <think></think> #}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
ASK = [{"role": "user", "content": "Why?"}]
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a\\tb"}}\n</tool_call>'


def made(template, num_blocks):
    model, tokenizer = load_model()
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    tokenizer.has_chat_template = True
    return Engine(model, tokenizer, num_blocks=num_blocks, prewarm=False)


@pytest.fixture(scope="module")
def engine():
    return made(TEMPLATE, 256)


def saying(engine, text, **options):
    """Options with which the model says a text, and ends."""
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    ids = [*ids, engine.tokenizer.eos_token_id]
    prompts = {}

    def only(tokens, logits):
        start = prompts.setdefault("length", tokens.size)
        at = min(tokens.size - start, len(ids) - 1)
        return mx.where(mx.arange(logits.shape[-1]) == ids[at], 0.0, -mx.inf)[None]

    return SamplingParams(max_tokens=200, logits_processors=(only,), **options)


@pytest.fixture
def prompts(engine, monkeypatch):
    return recorded(engine, monkeypatch)


def recorded(engine, monkeypatch):
    """The texts of the prompts that reach the engine."""
    texts, add = [], engine.add_request

    def recording(prompt, *args, **options):
        texts.append(engine.tokenizer.decode(prompt))
        return add(prompt, *args, **options)

    monkeypatch.setattr(engine, "add_request", recording)
    return texts


def test_the_template_makes_the_prompt(engine, prompts):
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    history = [
        {"role": "user", "content": parts},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "read", "arguments": '{"path": "x"}'}}],
        },
        {"role": "tool", "content": "file"},
    ]
    kept = copy.deepcopy(history)
    engine.chat(history, max_tokens=1, chat_template_kwargs={"thinking": True})
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "x"}}\n</tool_call>'
    assert prompts == [f"<|user|>Why?<|assistant|>{call}<|tool|>file<|assistant|><think>\n"]
    assert history == kept


def test_a_template_that_takes_text_gets_arguments_as_text(monkeypatch):
    template = TEMPLATE.replace("c.function.arguments | tojson", "'' + c.function.arguments")
    engine = made(template, 16)
    prompts = recorded(engine, monkeypatch)
    function = {"name": "read", "arguments": {"path": "x"}}
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    engine.chat([*ASK, said, *ASK], tools=[TOOL], max_tokens=1)
    assert '{"name": "read", "arguments": {"path": "x"}}\n</tool_call><|user|>' in prompts[0]
    assert function["arguments"] == {"path": "x"}


def test_the_name_of_a_control_token_is_text(engine, monkeypatch):
    """In a message, a result and a tool. The prompt of `generate` is raw."""
    name, number = engine.tokenizer.eos_token, engine.tokenizer.eos_token_id
    prompts, add = [], engine.add_request

    def recording(prompt, *args, **options):
        prompts.append(list(prompt))
        return add(prompt, *args, **options)

    monkeypatch.setattr(engine, "add_request", recording)
    tool = copy.deepcopy(TOOL)
    tool["function"]["description"] = name
    chat = [{"role": "user", "content": f"what is {name}?"}, {"role": "tool", "content": name}]
    engine.chat(chat, max_tokens=1, tools=[tool])
    (tokens,) = prompts
    assert number not in tokens and engine.tokenizer.decode(tokens).count(name) == 3
    assert number in engine.tokenizer.encode(f"what is {name}?")


def test_thoughts_are_apart(engine):
    (answer,) = engine.chat(ASK, saying(engine, "<think>\nhm <b>\n</think>\n\nSo it is."))
    assert (answer.reasoning.strip(), answer.text.strip()) == ("hm <b>", "So it is.")
    assert answer.tool_calls == () and answer.finish_reason == "stop"
    opened = {"thinking": True}
    (answer,) = engine.chat(ASK, saying(engine, "hm</think>Yes"), chat_template_kwargs=opened)
    assert (answer.reasoning, answer.text) == ("hm", "Yes")
    (answer,) = engine.chat(ASK, saying(engine, "no thought</think>"))
    assert (answer.reasoning, answer.text) == ("", "no thought</think>")


def test_calls_are_what_the_model_wrote(engine):
    said = saying(engine, f"Look: {CALL}")
    (answer,) = engine.chat(ASK, said, tools=[TOOL])
    assert answer.text.strip() == "Look:"
    (call,) = answer.tool_calls
    assert isinstance(call, ToolCall) and call.name == "read"
    assert json.loads(call.arguments) == {"path": "a\tb"}
    (answer,) = engine.chat(ASK, saying(engine, CALL))
    assert answer.tool_calls == () and answer.text == CALL


def test_several_chats_and_their_options(engine, prompts):
    chats = [ASK, [{"role": "user", "content": "How?"}]]
    done = engine.chat(chats, [saying(engine, "one"), saying(engine, "<think>2</think>two")])
    assert [(each.text, each.reasoning) for each in done] == [("one", ""), ("two", "2")]
    assert prompts == [f"<|user|>{word}?<|assistant|>" for word in ("Why", "How")]
    with pytest.raises(ValueError, match=r"\[chat\] 2 chats but 1 params"):
        engine.chat(chats, [SamplingParams()])


def test_streams_give_the_same_parts(engine):
    text = f"<think>a b</think>Look {CALL}{CALL}"
    (whole,) = engine.chat(ASK, saying(engine, text), tools=[TOOL])
    outputs = list(engine.stream_chat(ASK, saying(engine, text), tools=[TOOL]))
    assert "".join(output.text for output in outputs) == whole.text
    assert "".join(output.reasoning for output in outputs) == whole.reasoning == "a b"
    assert sum((output.tool_calls for output in outputs), ()) == whole.tool_calls
    assert len(whole.tool_calls) == 2
    last = outputs[-1].completion
    assert (last.text, last.tool_calls) == (whole.text, whole.tool_calls)
    seen = []
    engine.chat(ASK, saying(engine, text), seen.append, tools=[TOOL])
    assert [o.text for o in seen] == [o.text for o in outputs]


def test_a_closed_stream_ends_its_request(engine):
    stream = engine.stream_chat(ASK, saying(engine, "word " * 40))
    next(stream)
    stream.close()
    assert not engine.has_work


def test_an_aborted_chat_keeps_what_was_said(engine):
    def leave(output):
        if "b" in output.text:
            engine.abort(output.request_id)

    (answer,) = engine.chat(ASK, saying(engine, "<think>t</think>a b c d e f"), leave)
    assert answer.finish_reason == "abort"
    assert answer.reasoning == "t" and answer.text.startswith("a b")


def test_the_last_message_can_be_continued(engine, prompts):
    chat = [*ASK, {"role": "assistant", "content": "Since"}]
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    (answer,) = engine.chat(chat, saying(engine, " then <think>"), **ends)
    assert prompts == ["<|user|>Why?<|assistant|>Since"]
    assert answer.text == " then <think>"
    with pytest.raises(ValueError, match="expected add_generation_prompt=False"):
        engine.chat(chat, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("Why?", {}, r'messages is .Why\?.: expected a list of {"role"'),
        ([], {}, "messages is "),
        ([[]], {}, "messages is "),
        ([{"content": "x"}], {}, "messages is "),
        ([{"role": "user", "content": [{"type": "audio"}]}], {}, "content is "),
        ([{"role": "user", "content": [{"type": "image", "image": b""}]}], {}, "sees none"),
        (ASK, {"chat_template_kwargs": {"chat_template": "x"}}, "expected another name"),
        (ASK, {"chat_template_kwargs": {"tools": []}}, "the argument tools of chat"),
        (ASK, {"params": SamplingParams(), "max_tokens": 3}, "both params and options"),
        (ASK, {"top_q": 1}, "top_q"),
        (ASK, {"on_output": 3}, "on_output is 3"),
    ],
)
def test_a_mistake_is_named(engine, messages, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        engine.chat(messages, **options)
    assert not engine.has_work


def test_a_model_without_a_template_is_refused():
    engine = Engine(*load_model(), num_blocks=16, prewarm=False)
    with pytest.raises(ValueError, match="no chat template: expected a chat model, or generate"):
        engine.chat(ASK)
    with pytest.raises(ValueError, match="expected one chat"):
        engine.stream_chat([ASK, ASK])


def test_templates_read_properties_of_a_tool_without_parameters(monkeypatch):
    reads = "{% for t in tools or [] %}{{ t.function.parameters.properties | length }}{% endfor %}"
    engine = made(reads + TEMPLATE, 64)
    prompts = recorded(engine, monkeypatch)
    engine.chat(ASK, max_tokens=1, tools=[{"type": "function", "function": {"name": "f"}}])
    (text,) = prompts
    assert text.startswith("0<|system|>")
