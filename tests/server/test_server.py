"""The openai client talks to the server over a socket."""

import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from mlx_lm.generate import TextStateMachine
from mlx_lm.server import CompletionRequest
from server_harness import (
    CODE,
    MODEL,
    TIMEOUT,
    client,
    demo,
    metric,
    solo,
    wait_until,
)

from mlx_paged import FinishReason, SamplingParams

CHAT = [{"role": "user", "content": "def add(a, b):"}]
CHAT_PROMPT = "USER: def add(a, b):\nASSISTANT:"
LONG = {"max_tokens": 1500, "prompt": CODE, "logit_bias": {"1791": -100}}  # 1791 ends a text
pytest_plugins = ["server_fixtures"]


def test_a_completion_is_what_mlx_lm_generates(openai_client):
    answer = openai_client.completions.create(model=MODEL, prompt=CODE, max_tokens=24)
    text, tokens, _ = solo(CODE, 24)
    (choice,) = answer.choices
    assert (choice.text, choice.index, choice.finish_reason) == (text, 0, "length")
    num_prompt = len(demo()[1].encode(CODE))
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == len(tokens) == 24
    assert answer.usage.total_tokens == num_prompt + 24
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")


def test_a_chat_is_what_mlx_lm_generates_and_its_second_turn_finds_the_first_one(openai_client):
    answer = openai_client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=24)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == solo(CHAT_PROMPT, 24)[0]
    again = openai_client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4)
    assert again.usage.prompt_tokens_details.cached_tokens > 5


def test_a_stream_gives_the_same_in_pieces(openai_client):
    stream = openai_client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    *packets, usage = list(stream)
    deltas = [packet.choices[0].delta.content or "" for packet in packets]
    assert "".join(deltas) == solo(CHAT_PROMPT, 24)[0] and sum(map(bool, deltas)) > 8
    assert [packet.choices[0].finish_reason for packet in packets][-2:] == [None, "length"]
    assert not usage.choices and usage.usage.completion_tokens == 24


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_a_stop_string(openai_client, stream):
    text = solo(CODE, 40)[0]
    stop = text[20:25]
    answer = openai_client.completions.create(
        model=MODEL, prompt=CODE, max_tokens=40, stop=["never", stop], stream=stream
    )
    choices = [packet.choices[0] for packet in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_the_log_probability_of_every_token_is_told(openai_client):
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=8, logprobs=True, top_logprobs=3
    )
    text, tokens, logprobs = solo(CHAT_PROMPT, 8)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(logprobs, abs=1e-4)
    assert [entry.id for entry in content] == tokens
    assert "".join(entry.token for entry in content).strip() == text.strip()
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        likely = [top.logprob for top in entry.top_logprobs]
        assert len(likely) == 3 and likely == sorted(likely, reverse=True)
        assert likely[0] == pytest.approx(entry.logprob)


def test_completions_and_streams_tell_log_probabilities_too(openai_client):
    whole = openai_client.completions.create(model=MODEL, prompt=CODE, max_tokens=6, logprobs=2)
    found = whole.choices[0].logprobs
    text, _, logprobs = solo(CODE, 6)
    assert found.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    joined = "".join(found.tokens)
    assert joined.strip() == text.strip() and all(len(top) == 2 for top in found.top_logprobs)
    for offset, token in zip(found.text_offset, found.tokens, strict=True):
        assert joined[offset : offset + len(token)] == token
    pieces = openai_client.completions.create(
        model=MODEL, prompt=CODE, max_tokens=6, logprobs=2, stream=True
    )
    offsets = [offset for piece in pieces for offset in piece.choices[0].logprobs.text_offset]
    assert offsets == found.text_offset
    stream = openai_client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=6, logprobs=True, stream=True
    )
    entries = [entry for packet in stream for entry in packet.choices[0].logprobs.content]
    assert [entry.logprob for entry in entries] == pytest.approx(solo(CHAT_PROMPT, 6)[2], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_come_as_the_client_expects_them(server, openai_client, monkeypatch, stream):
    """The test treats a comment line of the demo model as the tool call."""
    machine = TextStateMachine({"normal": [("# ", "tool")], "tool": [("\n", "normal")]})
    monkeypatch.setattr(server.backend, "text_machine", machine)
    parser = property(lambda self: lambda text, tools: {"name": "say", "arguments": {"a": text}})
    monkeypatch.setattr(type(server.backend.tokenizer), "tool_parser", parser)
    text = solo(CHAT_PROMPT, 8)[0]
    comment = text.partition("# ")[2].partition("\n")[0]
    assert comment
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=8,
        stream=stream,
        tools=[{"type": "function", "function": {"name": "say", "parameters": {}}}],
    )
    said = [p.choices[0].delta for p in answer] if stream else [answer.choices[0].message]
    (call,) = [call for message in said for call in message.tool_calls or ()]
    assert (call.function.name, json.loads(call.function.arguments)) == ("say", {"a": comment})
    assert "".join(message.content or "" for message in said) == text.replace(f"# {comment}\n", "")


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_draw_what_seeds_draw_one_after_the_other(openai_client, stream):
    options = {"model": MODEL, "prompt": CODE, "max_tokens": 16, "temperature": 1.0}
    alone = [openai_client.completions.create(seed=seed, **options) for seed in (7, 8, 9)]
    expected = [answer.choices[0].text for answer in alone]
    answer = openai_client.completions.create(seed=7, n=3, stream=stream, **options)
    texts, ends = ["", "", ""], {}
    for choice in (p.choices[0] for p in answer) if stream else answer.choices:
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == expected and len(set(texts)) == 3
    assert set(ends) == {0, 1, 2}
    if not stream:
        assert answer.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)


def test_sixty_four_clients_at_once_get_what_each_gets_alone(server):
    prompts = [f"{CODE}    x{i % 8} = {i % 8}\n" for i in range(64)]

    def ask(i):
        with client(server) as own:
            options = {"model": MODEL, "prompt": prompts[i], "max_tokens": 12}
            if i % 2:
                return "".join(
                    p.choices[0].text for p in own.completions.create(stream=True, **options)
                )
            return own.completions.create(**options).choices[0].text

    with ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(ask, range(64)))
    assert texts == [solo(prompt, 12)[0] for prompt in prompts]


@pytest.mark.parametrize("key", ["stream", "whole"])
def test_a_client_that_hangs_up_frees_its_blocks_at_once(server, openai_client, key):
    generated = metric(server, "mlx_paged_generation_tokens_total")
    aborted = metric(server, 'mlx_paged_completions_total{finish_reason="abort"}') or 0
    if key == "stream":
        stream = openai_client.completions.create(model=MODEL, stream=True, n=2, **LONG)
        next(iter(stream))
        assert metric(server, "mlx_paged_kv_blocks_in_use") > 0
        stream.close()
    else:
        body = json.dumps(LONG).encode()
        with socket.create_connection(server.server_address[:2]) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            wait_until(lambda: metric(server, "mlx_paged_kv_blocks_in_use") > 0)
    wait_until(lambda: metric(server, "mlx_paged_kv_blocks_in_use") == 0)
    assert metric(server, "mlx_paged_generation_tokens_total") - generated < 1400
    wait_until(
        lambda: (
            (metric(server, 'mlx_paged_completions_total{finish_reason="abort"}') or 0) > aborted
        )
    )


def test_a_client_that_says_more_than_it_should_is_still_answered(server):
    body = json.dumps(LONG | {"max_tokens": 300, "stream": True}).encode()
    with socket.create_connection(server.server_address[:2], TIMEOUT) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        connection.recv(1)
        connection.sendall(b"more")
        assert b"[DONE]" in b"".join(iter(lambda: connection.recv(1 << 16), b""))


READER = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
connection.request("POST", "/v1/completions", sys.argv[2])
for line in connection.getresponse():
    print(line, flush=True)
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["reading", "reading no more"])
def test_clients_killed_in_the_middle_of_their_streams_leave_nothing(server, stopped):
    """No handler of a client runs after SIGKILL: only the kernel closes the connection."""
    aborts = 'mlx_paged_completions_total{finish_reason="abort"}'
    generated, aborted = metric(server, "mlx_paged_generation_tokens_total"), metric(server, aborts)
    command = [sys.executable, "-c", READER, str(server.server_address[1])]
    bodies = [json.dumps(LONG | {"stream": True, "n": n}) for n in (1, 2)]
    clients = [subprocess.Popen([*command, body], stdout=subprocess.PIPE) for body in bodies]
    for process in clients:
        assert b"data: " in process.stdout.readline()
    assert metric(server, "mlx_paged_kv_blocks_in_use") > 0
    assert metric(server, "mlx_paged_requests_running") == 3
    if stopped:
        for process in clients:
            process.send_signal(signal.SIGSTOP)
        now = metric(server, "mlx_paged_generation_tokens_total")
        wait_until(lambda: metric(server, "mlx_paged_generation_tokens_total") > now + 100)
    for process in clients:
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
    wait_until(lambda: metric(server, "mlx_paged_kv_blocks_in_use") == 0)
    assert metric(server, "mlx_paged_requests_running") == 0
    assert metric(server, "mlx_paged_requests_waiting") == 0
    assert metric(server, "mlx_paged_generation_tokens_total") - generated < 3 * 1500
    wait_until(lambda: metric(server, aborts) == (aborted or 0) + 3)


def test_completions_that_nobody_reads_any_more_are_ended(server):
    params = SamplingParams(max_tokens=1500, logit_bias={1791: -100})
    request = CompletionRequest("text", CODE, [], None, None)
    with server.backend.submit(request, 2, params) as generation:
        outputs = generation.outputs()
        next(outputs)
        assert server.backend.taken == 2
    wait_until(lambda: metric(server, "mlx_paged_kv_blocks_in_use") == 0)
    assert {output.completion.finish_reason for _, output in outputs if output.completion} == {
        FinishReason.ABORT
    }
