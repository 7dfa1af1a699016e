"""Chats over HTTP with openai's client: eight languages, stop strings, schemas, tools."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from chats import LANGUAGES, QUESTIONS
from jsonschema import validate
from mlx_lm_answers import LIMIT

from tests.support.commands.server_harness import MODEL, client, live

TOOLS = """{% if tools %}<|im_start|>system
You can call these functions: {{ tools | tojson }}
Call one with <tool_call>{"name": tool_call.name, "arguments": {...}}</tool_call><|im_end|>
{% endif %}"""
CALLS = (
    "(('<tool_call>' + (message.tool_calls[0].function | tojson) + '</tool_call>')"
    " if message.tool_calls else '')"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather", "parameters": SCHEMA},
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}
ASKED = [{"role": "user", "content": "How will the weather be in Lima in the next three days?"}]


@pytest.fixture(scope="module")
def openai_client(directory, float32):
    """The model's own template, with a part in front that tells it the tools of a request, and with
    the calls of earlier turns."""
    content = "message['content']"
    template = TOOLS + float32[1].chat_template.replace(content, f"{content} + {CALLS}")
    flags = ("--model", str(directory / "float32"), "--kv-memory", "0.2")
    with live(*flags, "--chat-template", template) as server:
        yield client(server)


def ask(openai_client, question, **options):
    """The text of a streamed answer, and why it ended."""
    messages = [{"role": "user", "content": question}]
    stream = openai_client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, stream=True, **options
    )
    choices = [chunk.choices[0] for chunk in stream]
    return "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason


def text_of(tokenizer, tokens):
    ends = tokens[-1] in tokenizer.eos_token_ids
    return tokenizer.decode(tokens[: len(tokens) - ends]), "stop" if ends else "length"


def test_eight_languages_at_once_are_answered_as_by_mlx_lm(openai_client, float32, answers):
    with ThreadPoolExecutor(len(LANGUAGES)) as threads:
        questions = [QUESTIONS[number] for number in LANGUAGES.values()]
        found = list(threads.map(lambda q: ask(openai_client, q, max_tokens=LIMIT), questions))
    expected = [text_of(float32[1], answers[number]) for number in LANGUAGES.values()]
    assert dict(zip(LANGUAGES, found, strict=True)) == dict(zip(LANGUAGES, expected, strict=True))


def test_an_answer_ends_before_a_stop_string(openai_client, float32, answers):
    text, _ = text_of(float32[1], answers[0])
    stop = " ".join(text.split()[12:14])
    found = ask(openai_client, QUESTIONS[0], max_tokens=LIMIT, stop=["never said", stop])
    assert found == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_obeys_a_schema(openai_client, temperature):
    form = {"name": "forecast", "strict": True, "schema": SCHEMA}
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        max_tokens=100,
        temperature=temperature,
        seed=5,
        response_format={"type": "json_schema", "json_schema": form},
    ).choices[0]
    validate(json.loads(answer.message.content), SCHEMA)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "weather"}}],
    ids=["any", "one"],
)
def test_a_tool_that_must_be_called_is_called(openai_client, choice):
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        max_tokens=100,
        temperature=0,
        tools=[WEATHER] if choice == "required" else [CLOCK, WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
    ).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather" and answer.finish_reason == "tool_calls"
    arguments = json.loads(call.function.arguments)
    validate(arguments, SCHEMA)
    assert not answer.message.content
