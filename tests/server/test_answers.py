"""What answers tell beside their text, and when."""

import asyncio
import json
import re
import time

import pytest

from mlx_paged.protocol import prompts
from mlx_paged.protocol.choices import CompletionChoice
from mlx_paged.server import answers, forms
from tests.support.commands.server_harness import CODE, exchange, live, post

pytest_plugins = ["tests.support.commands.server_fixtures"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_the_first_usage_of_a_stream_knows_what_was_cached(server, path):
    body = {"messages": [{"role": "user", "content": CODE * 9}], "max_tokens": 3, "stream": True}
    if path == "/v1/completions":
        options = {"continuous_usage_stats": True, "include_usage": True}
        body = {"prompt": CODE * 9, "max_tokens": 3, "stream": True, "stream_options": options}
    for _ in range(2):
        _, _, content = exchange(server, "POST", path, json.dumps(body))
    name = "cached_tokens" if path == "/v1/completions" else "cache_read_input_tokens"
    found = [int(number) for number in re.findall(rf'"{name}": (\d+)', content.decode())]
    assert len(found) >= 2 and found[0] > 16 and len(set(found)) == 1


def test_an_answer_without_text_has_an_empty_one(server):
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 4,
        "logit_bias": {"1791": 100},
    }
    _, _, answer = post(server, body, "/v1/chat/completions")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": ""}


def test_a_chats_stream_keeps_the_order_of_what_one_token_adds(server, monkeypatch):
    """Each event has a place for a thought, a text and calls, which clients read in this order."""
    add, end = CompletionChoice.add, {"id": "c", "type": "function", "index": 0}
    end["function"] = {"name": "f", "arguments": "{}"}

    def odd(self, output):
        delta = add(self, output)
        if output.completion is not None:
            delta.call(end)
            delta.write("text", "later")
            delta.write("reasoning", "hm")
            delta.call(end)
        return delta

    monkeypatch.setattr(CompletionChoice, "add", odd)
    messages = [{"role": "user", "content": CODE}]
    body = {"messages": messages, "max_tokens": 3, "stream": True, "logprobs": True}
    _, _, content = exchange(server, "POST", "/v1/chat/completions", json.dumps(body))
    lines = [line for line in content.decode().split("\n\n") if line.startswith("data: {")]
    choices = [json.loads(line[6:])["choices"][0] for line in lines]
    names = {"reasoning", "content", "tool_calls"}
    assert [names.intersection(choice["delta"]) for choice in choices][-3:] == [
        {"content", "tool_calls"},
        {"content"},
        {"reasoning", "tool_calls"},
    ]
    assert choices[-2]["delta"]["content"] == "later"
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + ["length"]
    assert [len(choice.get("logprobs", {}).get("content", ())) for choice in choices[-3:]] == [
        0,
        0,
        1,
    ]


def test_a_request_that_is_refused_late_has_no_stream(monkeypatch):
    encode = prompts.encode
    monkeypatch.setattr(answers, "COMMENT_AFTER_S", 0.0)
    monkeypatch.setattr(prompts, "encode", lambda *args: time.sleep(0.3) or encode(*args))
    with live() as server:
        body = json.dumps({"prompt": [5] * 2048, "max_tokens": 1, "stream": True})
        status, _, answer = post(server, body.encode())
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        monkeypatch.setattr(answers, "PATIENCE_S", 0.0)
        status, _, content = exchange(server, "POST", "/v1/completions", body)
        assert status == 200 and content.startswith(b": ") and b"context_length" in content


def sent_by(kind, seconds):
    """The bodies that a stream sends, which ends before so many seconds have passed."""
    sent = []

    async def send(message):
        sent.append(message.get("body"))

    async def stream():
        given = {"state": None, "path": "", "fields": {}, "threads": None, "share": None}
        await kind(arrived=time.monotonic(), **given)._stream(send)
        await asyncio.sleep(seconds)

    asyncio.run(stream())
    return sent


def test_no_comment_follows_an_event(monkeypatch):
    """The first event comes in the moment in which the prompt is read."""
    monkeypatch.setattr(answers, "COMMENT_AFTER_S", 0.01)

    class Quick(answers.Answer):
        @property
        def headers(self):
            return {}

        async def _events(self):
            await asyncio.sleep(0)
            self.submitted.set()
            yield b"data: 1\n\n"

    sent = sent_by(Quick, 0.1)
    assert sent == [None, b"data: 1\n\n", b""]


@pytest.mark.parametrize("kind", [answers.Answer, forms.MessageAnswer, forms.ResponseAnswer])
def test_a_silent_stream_shows_signs_of_life(monkeypatch, kind):
    """They come between events, also if tokens come that add nothing."""
    monkeypatch.setattr(answers, "QUIET_S", 0.1)
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    sign = ping if kind is forms.MessageAnswer else b": still generating\n\n"

    class Slow(kind):
        @property
        def headers(self):
            return {}

        async def _events(self):
            self.submitted.set()
            yield b"data: 1\n\n"
            for _ in range(7):
                await asyncio.sleep(0.05)
                yield b""
            yield b"data: 2\n\n"

    sent = sent_by(Slow, 0.25)
    first, *signs, second, end = sent[1:]
    assert (first, second, end) == (b"data: 1\n\n", b"data: 2\n\n", b"")
    assert signs and set(signs) == {sign}


def test_a_sign_of_life_cuts_no_event_in_two(monkeypatch):
    """The client is slow to read an event, which is sent in pieces."""
    monkeypatch.setattr(answers, "QUIET_S", 0.05)

    class Long(answers.Answer):
        @property
        def headers(self):
            return {}

        async def _events(self):
            self.submitted.set()
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"

    sent = []

    async def send(message):
        for part in message.get("body", b"").split(b" "):
            await asyncio.sleep(0.12)
            sent.append(part)

    given = {"state": None, "path": "", "fields": {}, "threads": None, "share": None}
    asyncio.run(Long(arrived=time.monotonic(), **given)._stream(send))
    assert sent[1:] == [b"data:", b"1\n\n", b"data:", b"2\n\n", b""]
