"""A streamed answer is the whole one, for random answers of the three APIs."""

import json
import random

import pytest

from mlx_paged.protocol.deltas import Delta
from tests.support.commands.scripted_models import scripted, template
from tests.support.commands.server_harness import exchange, post

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
COUNT = 1000
PART = 50
PIECES = (
    *("a", " b ", "\n", "END", "EN", "é🙂", "<", "<think>", "</think>", "</tool_call>", "{"),
    *('<tool_call>\n{"name": "f", "arguments": {"x": "a\\tb"}}\n</tool_call>',) * 3,
    *('<tool_call>{"name": "g", "arguments": {}}</tool_call>', '<tool_call>{"name"', "\n\n"),
)
SCHEMA = {"enum": [{"a": 1}, {"a": "<think>"}, {"b": [None, 2.5]}]}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}}


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "texts"])
def server(request):
    with scripted(template("json_tools"), TAGS if request.param else ()) as made:
        yield made


def asked(rng):
    """A path and a body, with a random answer and random fields."""
    path = rng.choice(["/v1/chat/completions", "/v1/messages", "/v1/responses"])
    said = rng.choice(["", "<think>why</think>", "\n<think>"])
    said += "".join(rng.choices(PIECES, k=rng.randint(0, 7)))
    most = rng.choice([400, rng.randint(1, 80)])
    body = {"temperature": 1.0, "seed": rng.randrange(99), "metadata": {"script": said}}
    has_tools, is_free = rng.random() < 0.7, rng.random() < 0.85
    user = [{"role": "user", "content": "hi"}]
    form = {"type": "json_schema", "name": "s", "schema": SCHEMA}
    if not is_free:
        del body["metadata"]
    if path == "/v1/chat/completions":
        body |= {"messages": user, "max_tokens": most, "n": rng.choice([1, 1, 3])}
        function = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
        body |= {"tools": function} if has_tools else {}
        if not is_free:
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        body |= rng.choice([{}, {"logprobs": True, "top_logprobs": 2}])
        body |= rng.choice([{}, {"stop": ["END", "\n\n"]}])
    elif path == "/v1/messages":
        body |= {"messages": user, "max_tokens": most}
        body |= {"tools": [{"name": "f", "input_schema": PARAMETERS}]} if has_tools else {}
        body |= {} if is_free else {"output_format": form}
        body |= rng.choice([{}, {"stop_sequences": ["END", "\n\n"]}])
    else:
        body |= {"input": "hi", "max_output_tokens": most}
        tools = [{"type": "function", "name": "f", "parameters": PARAMETERS}]
        tools.append({"type": "custom", "name": "g"})
        body |= {"tools": tools} if has_tools else {}
        body |= {} if is_free else {"text": {"format": form}}
        body |= rng.choice([{}, {"include": ["message.output_text.logprobs"]}])
        body |= rng.choice([{}, {"stop": ["END", "\n\n"]}, {"parallel_tool_calls": False}])
    return path, body


def events_of(server, path, body):
    given = json.dumps(body | {"stream": True}), {"Content-Type": "application/json"}
    status, _, raw = exchange(server, "POST", path, *given)
    assert status == 200, raw
    lines = raw.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def bare(value):
    """A value without the names and times that differ between answers."""
    if isinstance(value, dict):
        skipped = ("id", "call_id", "created_at", "index", "sequence_number")
        kept = {key: x for key, x in value.items() if key not in skipped or isinstance(x, dict)}
        return {key: bare(x) for key, x in kept.items()}
    return [bare(x) for x in value] if isinstance(value, list) else value


def of_chat(events):
    """The choices that the chunks of a chat add up to."""
    found = {}
    for event in events:
        for part in event["choices"]:
            told = found.setdefault(part["index"], {"text": "", "thought": "", "calls": []})
            delta = part["delta"]
            told["text"] += delta.get("content") or ""
            told["thought"] += delta.get("reasoning") or ""
            told["calls"] += [call["function"] for call in delta.get("tool_calls") or []]
            told.setdefault("logprobs", []).extend((part.get("logprobs") or {}).get("content", []))
            told["reason"] = part["finish_reason"]
    return [bare(found[index]) for index in sorted(found)]


def whole_of_chat(answer):
    return [
        bare(
            {
                "text": choice["message"].get("content") or "",
                "thought": choice["message"].get("reasoning", ""),
                "calls": [call["function"] for call in choice["message"].get("tool_calls") or []],
                "logprobs": (choice.get("logprobs") or {}).get("content", []),
                "reason": choice["finish_reason"],
            }
        )
        for choice in answer["choices"]
    ]


def of_messages(events):
    """The blocks and the end of a message."""
    blocks, end = [], {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            for key, piece in event["delta"].items():
                if key == "partial_json":
                    blocks[-1]["json"] += piece
                elif key != "type":
                    blocks[-1][key] += piece
        elif event["type"] == "message_delta":
            end = event["delta"]
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return bare([blocks, end["stop_reason"], end["stop_sequence"]])


def of_responses(events):
    """The last response; what the events before told of its items is in them."""
    output = events[-1]["response"]["output"]
    told = [[event[key] for event in events if event["type"] == name] for name, key in ENDS]
    parts = [part for item in output for part in item.get("content", ())]
    assert told[0] == output
    assert "".join(told[1]) == "".join(p["text"] for p in parts if p["type"] == "output_text")
    entries = [entry for each in told[2] for entry in each]
    assert entries == [entry for part in parts for entry in part.get("logprobs", ())]
    return bare([output, events[-1]["response"]["status"]])


ENDS = (
    ("response.output_item.done", "item"),
    ("response.output_text.delta", "delta"),
    ("response.output_text.delta", "logprobs"),
)


def difference(server, rng):
    """Both answers to a random request, if they differ."""
    path, body = asked(rng)
    status, _, answer = post(server, body, path)
    assert status == 200, answer
    events = events_of(server, path, body)
    if path == "/v1/chat/completions":
        both = whole_of_chat(answer), of_chat(events)
    elif path == "/v1/messages":
        kept = [answer["content"], answer["stop_reason"], answer["stop_sequence"]]
        both = bare(kept), of_messages(events)
    else:
        both = bare([answer["output"], answer["status"]]), of_responses(events)
    return None if both[0] == both[1] else (body, *both)


@pytest.mark.heavy
@pytest.mark.sampled(10)
@pytest.mark.parametrize("first", range(0, COUNT // 2, PART))
def test_random_answers_are_the_same_streamed_and_whole(server, first):
    for seed in range(first, first + PART):
        assert difference(server, random.Random(seed)) is None


def test_a_planted_fault_is_found(server, monkeypatch):
    """A whole answer whose parts lose a character when they are joined."""
    plain = Delta.add

    def lossy(self, later):
        plain(self, later)
        for part in self.parts:
            part.text = part.text.replace("EN", "E")

    monkeypatch.setattr(Delta, "add", lossy)
    assert any(difference(server, random.Random(seed)) for seed in range(PART))
