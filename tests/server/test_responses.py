"""OpenAI's Responses API, with its client over a socket."""

import json
from typing import Literal

import pytest
from jsonschema import validate
from openai import APIError
from pydantic import BaseModel

from mlx_paged.formats.format import Format
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.thoughts import Thoughts
from mlx_paged.protocol.choices import CompletionChoice
from tests.support.commands.server_harness import (
    MODEL,
    SCHEMA,
    TEMPLATE,
    client,
    demo,
    exchange,
    live,
    only_model,
    post,
    solo,
    tool_format,
)

pytest_plugins = ["tests.support.commands.server_fixtures"]
FLAGS = "--chat-template", TEMPLATE
TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("f", "g")]
PROMPT = "user: def f\n"


class FirstLine(Format):
    """The first line of an answer is a thought."""

    def begin(self, generation_prompt, continued):
        return Begin.THOUGHT


FIRST_LINE = FirstLine(Marks({}), Thoughts("", "\n"))


@pytest.fixture(scope="module")
def create(server):
    with client(server) as made:

        def create(**options):
            return made.responses.create(
                **{"model": MODEL, "input": "def f", "max_output_tokens": 24} | options
            )

        create.client = made
        yield create


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("max_output_tokens", 0, "max_output_tokens"),
        ("text", {"format": {"type": "bad"}}, "text.format"),
        ("input", [], "input"),
    ],
)
def test_mistakes_have_the_names_of_this_api(server, field, value, named):
    body = {"input": "def f", "max_output_tokens": 1} | {field: value}
    status, _, answer = post(server, body, "/v1/responses")
    assert (status, answer["error"]["param"]) == (400, named), answer
    assert answer["error"]["message"].startswith(f"{named}: expected")


def test_times_are_whole_seconds(server):
    _, _, answer = post(server, {"input": "def f", "max_output_tokens": 1}, "/v1/responses")
    assert isinstance(answer["created_at"], int)


def events_of(stream):
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def plain(item):
    """What must not differ between a stream and a whole answer."""
    skipped = ("id", "call_id", "created_at")
    if isinstance(item, dict):
        return {key: plain(value) for key, value in item.items() if key not in skipped}
    return [plain(each) for each in item] if isinstance(item, list) else item


def test_a_response_is_what_mlx_lm_generates(create):
    answer = create()
    text, tokens, _ = solo(PROMPT, 24)
    assert answer.output_text == text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == len(demo()[1].encode(PROMPT))
    assert answer.usage.output_tokens == len(tokens) == 24
    assert (answer.store, answer.tools, answer.model) == (False, [], MODEL)
    again = create()
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert again.id != answer.id


def test_a_stream_tells_of_each_item_and_ends_with_the_same_response(create):
    whole = create()
    events = events_of(create(stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    middle = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * middle,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert middle > 5
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == whole.output_text == events[-4].text
    assert events[-1].response.id == events[0].response.id
    assert events[0].response.output == [] and events[0].response.status == "in_progress"
    assert plain(events[-1].response.to_dict()) | {"usage": 0} == plain(whole.to_dict()) | {
        "usage": 0
    }


@pytest.mark.parametrize("streams", [False, True])
def test_the_client_follows_a_stream_and_parses_a_class(create, streams):
    class Point(BaseModel):
        x: Literal[1, 2]
        y: bool

    options = {"model": MODEL, "input": "def f", "max_output_tokens": 80, "text_format": Point}
    if streams:
        with create.client.responses.stream(**options) as stream:
            parsed = stream.get_final_response().output_parsed
    else:
        parsed = create.client.responses.parse(**options).output_parsed
    assert isinstance(parsed, Point)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "g"}])
def test_functions_are_called(server, create, choice, streams):
    with tool_format(server, "json_tools"):
        options = {"tools": TOOLS, "tool_choice": choice, "max_output_tokens": 200}
        options |= {"parallel_tool_calls": False, "temperature": 1, "extra_body": {"seed": 3}}
        answer = create(**options, stream=streams)
    if streams:
        events = events_of(answer)
        added = [e.item for e in events if e.type == "response.output_item.added"]
        assert {item.arguments for item in added} == {""}
        deltas = [e.delta for e in events if e.type.endswith("arguments.delta")]
        done = [e.arguments for e in events if e.type.endswith("arguments.done")]
        answer = events[-1].response
        assert deltas == done == [item.arguments for item in answer.output]
    assert answer.output and answer.tools[0].name == "f"
    for item in answer.output:
        assert item.type == "function_call" and item.call_id
        assert item.name in (("f", "g") if choice == "required" else ("g",))
        validate(json.loads(item.arguments), SCHEMA)


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_whole_answer_has_the_order_of_its_stream(server, create, logprobs):
    """What is cut off after a call is text, and is what is incomplete."""
    found = 0
    options = {"tools": TOOLS, "tool_choice": "required", "temperature": 1}
    if logprobs:
        options["include"] = ["message.output_text.logprobs"]
    with tool_format(server, "json_tools"):
        for seed in range(6):
            options["max_output_tokens"] = 40 + 4 * seed
            options["extra_body"] = {"seed": seed}
            whole = create(**options)
            streamed = events_of(create(**options, stream=True))[-1].response
            output = plain(whole.to_dict())["output"]
            assert output == plain(streamed.to_dict())["output"]
            kinds = [item["type"] for item in output]
            assert all(item["content"][0]["text"] for item in output if "content" in item)
            if kinds[-2:] == ["function_call", "message"]:
                found += 1
                statuses = [item["status"] for item in output]
                assert statuses == ["completed"] * (len(kinds) - 1) + ["incomplete"]
                assert bool(output[-1]["content"][0]["logprobs"]) == logprobs
    assert found > 1


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_of_thoughts_make_no_messages(server, create, monkeypatch, streams):
    monkeypatch.setattr(only_model(server), "format", FIRST_LINE)
    options = {"input": "def g # why\n", "max_output_tokens": 120}
    answer = create(**options, include=["message.output_text.logprobs"], stream=streams)
    answer = events_of(answer)[-1].response if streams else answer
    bare = create(**options)
    assert [item.type for item in answer.output] == [item.type for item in bare.output]
    texts = [item.content[0] for item in answer.output if item.type == "message"]
    assert "reasoning" in {item.type for item in answer.output} and texts
    for text in texts:
        made = "".join(entry.token for entry in text.logprobs)
        assert text.text.strip() in made


@pytest.mark.parametrize("streams", [False, True])
def test_reasoning_is_an_item_of_its_own_and_comes_back_sealed(
    server, create, monkeypatch, streams
):
    model = only_model(server)
    monkeypatch.setattr(model, "format", FIRST_LINE)
    options = {"input": "def g # why\n", "max_output_tokens": 120}
    options |= {"include": ["reasoning.encrypted_content"]}
    answer = create(**options, stream=streams)
    if streams:
        events = events_of(answer)
        answer = events[-1].response
        kinds = [event.type for event in events]
        assert kinds.index("response.reasoning_text.delta") < kinds.index(
            "response.reasoning_text.done"
        )
    thoughts = [item for item in answer.output if item.type == "reasoning"]
    first = solo("user: def g # why\n\n", 120)[0].partition("\n")[0]
    assert first and [part.text for item in thoughts for part in item.content] == [first]
    assert thoughts[0].encrypted_content.endswith(thoughts[0].content[0].text)
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_the_items_of_earlier_turns_reach_the_template(server, create):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.reasoning_content %}"
        "({{ m.reasoning_content }}){% endif %}{% for c in m.tool_calls or [] %}"
        "{{ c.id }}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
        "{{ m.tool_call_id }}\n{% endfor %}"
    )
    part = {"type": "output_text", "text": "calling", "annotations": []}
    seven = {"type": "input_text", "text": "7"}
    items = [
        {"type": "message", "role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "mlx_paged:hm"},
        {"type": "message", "id": "m", "role": "assistant", "content": [part], "status": "done"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"type": "function_call_output", "call_id": "c2", "output": [seven]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAA"},
        {"role": "user", "content": "so?"},
    ]
    prompt = (
        "system: Be short.\n\nBe kind.\nuser: a\nassistant: calling(hm)c1f{'a': 1}c2g{}\n"
        "tool: 42c1\ntool: 7c2\nassistant: one\nassistant: two\nuser: so?\n"
    )
    with live("--chat-template", template) as own, client(own) as made:
        answer = made.responses.create(
            model=MODEL, input=items, instructions="Be short.", max_output_tokens=9
        )
    assert answer.usage.input_tokens == len(demo()[1].encode(prompt))
    assert answer.output_text == solo(prompt, 9)[0]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": 7}, "reasoning"),
    ],
    ids=str,
)
def test_what_cannot_be_obeyed_is_refused_by_name(server, changes, name):
    body = {"model": MODEL, "input": "a", "max_output_tokens": 1} | changes
    status, _, answer = post(server, body, "/v1/responses")
    assert (status, answer["error"]["param"]) == (400, name)
    assert answer["error"]["type"] == "invalid_request_error"


def test_what_changes_no_answer_is_named(server):
    body = {"model": MODEL, "input": "a", "max_output_tokens": 1}
    quiet = {"store": False, "metadata": {}, "client_metadata": {}, "truncation": "disabled"}
    quiet |= {"include": ["reasoning.encrypted_content"], "parallel_tool_calls": True}
    status, headers, _ = post(server, body | quiet, "/v1/responses")
    assert status == 200 and "x-ignored-fields" not in headers
    loud = {"store": True, "truncation": "auto", "text": {"verbosity": "low"}}
    loud |= {"reasoning": {"summary": "auto"}, "include": ["file_search_call.results"]}
    loud |= {"tools": [{"type": "web_search"}, TOOLS[0] | {"strict": True}]}
    loud |= {"tool_choice": "none"}
    status, headers, _ = post(server, body | loud, "/v1/responses")
    names = "include.file_search_call.results, reasoning.summary, store, text.verbosity"
    names += ", tools.strict, tools.web_search, truncation"
    assert (status, headers["x-ignored-fields"]) == (200, names)


def test_a_failure_is_the_last_event(server, create, monkeypatch):
    def fail(self, output):
        raise KeyError("no such tool")

    with monkeypatch.context() as patch:
        patch.setattr(CompletionChoice, "add", fail)
        with pytest.raises(APIError, match="the answer could not be made"):
            create()
    whole = CompletionChoice.add

    def late(self, output):
        if self.num_tokens == 4:
            raise KeyError("late")
        return whole(self, output)

    with monkeypatch.context() as patch:
        patch.setattr(CompletionChoice, "add", late)
        events = events_of(create(stream=True))
    assert [events[0].type, events[-1].type] == ["response.created", "response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert failed.error.message == "the answer could not be made"


def test_answers_are_not_kept(server):
    assert exchange(server, "GET", "/v1/responses/resp_1")[0] == 404
