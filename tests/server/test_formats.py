"""What a server makes of thoughts and calls, by format, on tiny models that follow scripts."""

import json

import pytest

from mlx_paged.protocol.turns import JOINED, merged
from tests.support.commands.scripted_models import CHANNELS, called, chat, scripted, template
from tests.support.commands.server_harness import MODEL, client, only_model, post

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
SHORT = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"x": {"enum": ["a", "b"]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
"""Its calls soon end, whatever tokens are drawn."""

SCHEMA = {"const": {"tag": "<think><tool_call>", "n": 1}}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def ask(text):
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server():
    with scripted(template("json_tools"), TAGS) as made:
        yield made


@pytest.fixture(scope="module")
def opened():
    """The prompt of the model opens a thought."""
    with scripted(template("json_tools", "<think>\n"), TAGS) as made:
        yield made


PAST = [
    *ask("q"),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
]


@pytest.mark.parametrize(
    "messages",
    [
        ask("What does <think> do?"),
        [*PAST, {"role": "tool", "tool_call_id": "1", "content": "it splits at <think>"}],
        [{"role": "system", "content": "Never write <think>."}, *ask("hi")],
        [*ask("q"), {"role": "assistant", "content": "It begins with <think>."}, *ask("and?")],
    ],
)
def test_tags_in_messages_open_no_thought(server, messages):
    message, reason = chat(server, "The answer is 4.", messages=messages)
    assert (message["content"], message.get("reasoning"), reason) == (
        "The answer is 4.",
        None,
        "stop",
    )
    message, _ = chat(server, messages=messages, thinking_budget=2, max_tokens=8)
    assert "reasoning" not in message
    fields = {"messages": messages, "structured_outputs": {"regex": "a|b"}}
    assert chat(server, **fields)[0]["content"] in ("a", "b")
    message, _ = chat(server, messages=messages, response_format=FORM)
    assert json.loads(message["content"]) == SCHEMA["const"]


@pytest.mark.parametrize(
    ("said", "thought", "content"),
    [
        ("<think>a</think>b", "a", "b"),
        ("\n <think>a</think>b", "a", "b"),
        ("Models write <think>. So.", None, "Models write <think>. So."),
        ("<think>a</think>`<think>` b</think>", "a", "`<think>` b</think>"),
        ("<think>never ended", "never ended", ""),
        ("<think></think>b", None, "b"),
    ],
)
def test_a_thought_begins_an_answer_or_is_none(server, said, thought, content):
    message, _ = chat(server, said)
    assert (message.get("reasoning"), message["content"]) == (thought, content)


def test_the_prompt_may_open_a_thought(opened):
    message, _ = chat(opened, "a</think>b")
    assert (message["reasoning"], message["content"]) == ("a", "b")
    message, _ = chat(opened, messages=ask("x </think> y"), thinking_budget=3, max_tokens=9)
    assert len(message["reasoning"].encode()) <= 9 and "</think>" not in message["content"]
    message, _ = chat(opened, response_format=FORM, thinking_budget=3)
    assert json.loads(message["content"]) == SCHEMA["const"] and message["reasoning"]


@pytest.mark.parametrize(
    ("turn", "said", "thought", "content"),
    [
        ("<think>so", " on</think>b", " on", "b"),
        ("\n<think>so", "</think>b", None, "b"),
        ("<think>so</think>a", "b<think>", None, "b<think>"),
        ("a <think>", "b</think>", None, "b</think>"),
        ("a", "<think>b", None, "<think>b"),
    ],
)
def test_a_continued_turn_is_part_of_the_answer(opened, turn, said, thought, content):
    messages = [*ask("hi"), {"role": "assistant", "content": turn}]
    message, _ = chat(opened, said, messages=messages, continue_final_message=True)
    assert (message.get("reasoning"), message["content"]) == (thought, content)


def test_text_completions_are_raw(server):
    for said in ("A <think>b</think> c", "<think>b", "<tool_call>\n{}"):
        body = {"prompt": "x", "max_tokens": 60, "metadata": {"script": said}}
        _, _, answer = post(server, body)
        assert answer["choices"][0]["text"] == said


CODE = "    def f():\n\treturn '<think></think>'\n"
MARKED = {
    "json_tools": lambda text: (
        f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': {'x': text}})}\n</tool_call>"
    ),
    "qwen3_coder": lambda text: (
        f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    ),
    "harmony": lambda text: (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        f"{json.dumps({'x': text})}<|call|>"
    ),
}
HARMONY = tuple(
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")
)


def model_of(family, has_tokens=True):
    if family == "harmony":
        return scripted(CHANNELS, HARMONY)
    return scripted(template(family), TAGS if has_tokens else ())


@pytest.mark.parametrize("family", MARKED)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_arguments_are_what_the_model_wrote(family, has_tokens):
    if family == "harmony" and not has_tokens:
        pytest.skip("all its models have the tokens")
    mark = MARKED[family]
    with model_of(family, has_tokens) as server:
        message, reason = chat(server, mark(CODE), tools=[TOOL])
        assert (called(message), reason) == ([("f", {"x": CODE})], "tool_calls")
        whole = mark("abc abc abc")
        count = len(only_model(server).tokenizer.encode(whole))
        for cut in range(count - 12, count - 1, 5):  # behind the header of Harmony
            message, reason = chat(server, whole, tools=[TOOL], max_tokens=cut)
            assert (reason, called(message)) == ("length", [])
            told = message["content"].removeprefix("<tool_call>")
            assert told and told in whole
        message, reason = chat(server, mark(CODE))
        assert not called(message) and reason == "stop"
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            fields = {"tools": [SHORT], "tool_choice": choice, "temperature": 1.0, "seed": 1}
            message, reason = chat(server, max_tokens=1000, **fields)
            assert reason == "tool_calls" and called(message)[0][0] == "f"
            assert all(given["x"] in ("a", "b") for _, given in called(message))


def test_harmony_reads_its_channels_and_takes_them_back():
    said = (
        "<|channel|>analysis<|message|>A greeting.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello!"
    )
    with model_of("harmony") as server:
        message, _ = chat(server, said)
        assert (message["content"], message["reasoning"]) == ("Hello!", "A greeting.")
        again = [*ask("hi"), {"role": "assistant"} | message, *ask("more")]
        assert chat(server, "<|channel|>final<|message|>Yes", messages=again)[0]["content"] == "Yes"
        calls = MARKED["harmony"]("1").replace("<|call|>", "<|end|><|start|>assistant")
        said = "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant" + calls
        message, _ = chat(server, said + MARKED["harmony"]("2"), tools=[TOOL])
        assert called(message) == [("f", {"x": "1"}), ("f", {"x": "2"})]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "r"}
            for call in message["tool_calls"]
        ]
        turn = message | {"reasoning_content": message["reasoning"], "content": "I look."}
        again = [*ask("hi"), turn, *results]
        message, _ = chat(server, "<|channel|>final<|message|>ok", messages=again, tools=[TOOL])
        assert message["content"] == "ok"
        empty = [*ask("hi"), message | {"tool_calls": []}, *ask("more")]
        assert chat(server, "<|channel|>final<|message|>ok", messages=empty)[0]["content"] == "ok"
        message, reason = chat(server, response_format=FORM, max_tokens=2000, thinking_budget=4)
        assert reason == "length" or json.loads(message["content"]) == SCHEMA["const"]


def test_the_order_of_text_and_calls_is_kept():
    said = "Sure.\n" + "\n".join(MARKED["json_tools"](str(i)) for i in (1, 2)) + "\n"
    tools = [{"type": "function", "name": "f", "parameters": TOOL["function"]["parameters"]}]
    body = {"input": "hi", "max_output_tokens": 400, "tools": tools, "metadata": {"script": said}}
    with model_of("json_tools") as server:
        _, _, whole = post(server, body, "/v1/responses")
        kinds = [item["type"] for item in whole["output"]]
        assert kinds == ["message", "function_call", "function_call"]
        assert whole["output"][0]["content"][0]["text"] == "Sure.\n"


WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        },
    },
}
FILES = (
    "\tdef f():\n\t\treturn 1\n",
    "    a\n\n  b  \n",
    "A thought begins with <think> and ends with </think>.\n",
    "a </tool_call> b <tool_call> c\n",
    "</parameter>\n</function>\n",
    '{"x": "\\n", "y": [1, 2]}\n',
    "é🙂\r\n\u2028",
    "",
    "null",
    "<|im_end|> <tool_call>{}</tool_call> &lt;\n",
)
WRITES = {
    "json_tools": lambda calls: "\n".join(
        f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': call})}\n</tool_call>"
        for call in calls
    ),
    "qwen3_coder": lambda calls: "\n".join(
        "<tool_call>\n<function=write>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in call.items())
        + "</function>\n</tool_call>"
        for call in calls
    ),
    "harmony": lambda calls: (
        "<|channel|>analysis<|message|>I write.<|end|><|start|>assistant"
        + "<|end|><|start|>assistant".join(
            "<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
            + json.dumps(call, ensure_ascii=False)
            for call in calls
        )
        + "<|call|>"
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", WRITES)
def test_files_are_what_the_model_wrote(family, stream, tmp_path):
    check_files(family, stream, len(FILES) // 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", WRITES)
def test_files_of_twenty_turns_are_what_the_model_wrote(family, stream, tmp_path):
    check_files(family, stream, 20, tmp_path)


def check_files(family, stream, num_turns, tmp_path):
    """A client writes what two calls a turn ask for, and sends everything back."""
    messages, wanted = ask("Write."), {}
    with model_of(family) as server, client(server) as made:
        for turn in range(num_turns):
            calls = [
                {"path": f"{turn}-{i}", "text": FILES[(2 * turn + i) % len(FILES)]} for i in (0, 1)
            ]
            wanted |= {call["path"]: call["text"] for call in calls}
            answer = made.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=800,
                tools=[WRITE],
                stream=stream,
                metadata={"script": WRITES[family](calls)},
            )
            found = [
                call
                for part in (answer if stream else [answer])
                for call in getattr(part.choices[0], "delta" if stream else "message").tool_calls
                or []
            ]
            assert len(found) == 2
            for call in found:
                given = json.loads(call.function.arguments)
                (tmp_path / given["path"]).write_bytes(given["text"].encode())
            said = [
                {"id": c.id, "type": "function", "function": c.function.to_dict()} for c in found
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": said})
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "done"} for call in found
            ]
    read = {path.name: path.read_bytes().decode() for path in tmp_path.iterdir()}
    assert read == wanted


READS = (
    "{% for t in tools or [] %}{{ t.function.name }}("
    "{% for n, p in t.function.parameters.properties.items() %}{{ n }}{% endfor %}){% endfor %}"
)


@pytest.mark.parametrize("own", [{}, {"parameters": None}, {"parameters": {"type": "object"}}])
def test_a_function_without_parameters_has_empty_ones(own):
    body = {"messages": ask("hi"), "max_tokens": 5, "metadata": {"script": "ok"}}
    told = {"type": "function", "function": {"name": "f"} | own}
    with scripted(READS + template("json_tools")) as made:
        assert post(made, body | {"tools": [told]}, "/v1/chat/completions")[0] == 200
        claude = {"name": "f", "input_schema": {"type": "object"}}
        assert post(made, body | {"tools": [claude]}, "/v1/messages")[0] == 200


STRICT = (
    "{% if not loop.first and m.role in ('user', 'assistant') "
    "and messages[loop.index0 - 1].role == m.role %}{{ raise_exception('alternate') }}{% endif %}"
)


@pytest.mark.parametrize("is_strict", [True, False])
def test_two_turns_are_joined_where_the_template_refuses_them(is_strict):
    written = template("json_tools")
    strict = written.replace("{% for m in messages %}", "{% for m in messages %}" + STRICT)
    two = [*ask("context"), *ask("question")]
    with scripted(strict if is_strict else written) as made:
        body = {"messages": two, "max_tokens": 5, "metadata": {"script": "ok"}}
        status, _, answer = post(made, body, "/v1/chat/completions")
        assert status == 200, answer
        one = [*ask("context\n\nquestion")]
        _, _, other = post(made, body | {"messages": one}, "/v1/chat/completions")
        is_same = answer["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
        assert is_same == is_strict
        assert post(made, body, "/v1/messages")[0] == 200
        body = {"input": two, "max_output_tokens": 5, "metadata": {"script": "ok"}}
        assert post(made, body, "/v1/responses")[0] == 200


def test_joined_turns_have_the_contents_and_the_calls_of_both():
    said = [
        {"role": "assistant", "content": None, "tool_calls": [1]},
        {"role": "assistant", "content": "a", "tool_calls": [2]},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "tool", "content": "d"},
        {"role": "tool", "content": "e"},
    ]
    found = merged(said, JOINED)
    assert found[0] == {"role": "assistant", "content": "a", "tool_calls": [1, 2]}
    assert "".join(part["text"] for part in found[1]["content"]) == "b\n\nc"
    assert found[2:] == said[4:]
