"""The openai client talks to the server over a socket."""

import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean

import pytest

from mlx_paged.formats.foreign import Foreign
from mlx_paged.formats.marks import Marks
from tests.support.commands.server_harness import (
    CODE,
    MODEL,
    TIMEOUT,
    client,
    demo,
    live,
    metric,
    only_model,
    post,
    solo,
    wait_until,
    written,
)

CHAT = [{"role": "user", "content": "def add(a, b):"}]
CHAT_PROMPT = "USER: def add(a, b):\nASSISTANT:"
LONG = {"max_tokens": 1500, "prompt": CODE, "logit_bias": {"1791": -100}}  # 1791 ends a text
POST = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
pytest_plugins = ["tests.support.commands.server_fixtures"]


def test_a_completion_is_what_mlx_lm_generates(openai_client):
    answer = openai_client.completions.create(model=MODEL, prompt=CODE, max_tokens=24)
    text, tokens = written(CODE, 24), solo(CODE, 24)[1]
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


def test_every_piece_may_tell_the_usage_so_far(openai_client):
    stream = openai_client.completions.create(
        model=MODEL,
        prompt=CODE,
        max_tokens=8,
        stream=True,
        stream_options={"continuous_usage_stats": True, "include_obfuscation": False},
    )
    counts = [piece.usage.completion_tokens for piece in stream]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 8


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_a_stop_string(openai_client, stream):
    text = written(CODE, 40)
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
    text, logprobs = written(CODE, 6), solo(CODE, 6)[2]
    assert found.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert "".join(found.tokens) == text and all(len(top) == 2 for top in found.top_logprobs)
    for offset, token in zip(found.text_offset, found.tokens, strict=True):
        assert whole.choices[0].text.startswith(token, offset)
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


TEMPLATE = "{% for m in messages %}USER: {{ m.content }}\nASSISTANT:{% endfor %}"
SAY = {"type": "function", "function": {"name": "say", "parameters": {}}}


@pytest.fixture(scope="module")
def tool_server():
    with live("--chat-template", TEMPLATE) as running:
        yield running


@pytest.fixture
def call_tools(tool_server, monkeypatch):
    """Asks for a chat whose tool calls `parse` reads. Returns the messages and the reason."""

    def ask(parse, stream=False, **options):
        model = only_model(tool_server)
        comments = Foreign(Marks({}), None, "comments", parse, "# ", "\n")  # they are the calls
        monkeypatch.setattr(model, "format", comments)
        monkeypatch.setattr(model, "abilities", model.abilities._replace(tools_problem=None))
        with client(tool_server) as own:
            answer = own.chat.completions.create(
                model=MODEL,
                messages=CHAT,
                stream=stream,
                **{"max_tokens": 8, "tools": [SAY]} | options,
            )
            if not stream:
                return [answer.choices[0].message], answer.choices[0].finish_reason
            choices = [packet.choices[0] for packet in answer]
            return [choice.delta for choice in choices], choices[-1].finish_reason

    return ask


def texts_of(messages):
    return "".join(message.content or "" for message in messages)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_come_as_the_client_expects_them(call_tools, stream):
    said, _ = call_tools(lambda text, tools: {"name": "say", "arguments": {"a": text}}, stream)
    text = solo(CHAT_PROMPT, 8)[0]
    comment = text.partition("# ")[2].partition("\n")[0]
    assert comment
    (call,) = [call for message in said for call in message.tool_calls or ()]
    assert (call.function.name, json.loads(call.function.arguments)) == ("say", {"a": comment})
    before, _, after = text.partition(f"# {comment}\n")
    assert texts_of(said) == before * bool(before.strip()) + after  # white space is not told


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "parse",
    [json.loads, lambda text, tools: {"arguments": {}}, lambda text, tools: {"x": 1}["name"]],
    ids=["no JSON", "no name", "a parser that fails"],
)
def test_a_tool_call_that_makes_no_sense_is_delivered_as_text(call_tools, parse, stream):
    said, reason = call_tools(lambda *args: parse(*args[: 1 + (parse is not json.loads)]), stream)
    assert texts_of(said) == solo(CHAT_PROMPT, 8)[0] and reason == "length"
    assert not any(message.tool_calls for message in said)


@pytest.mark.parametrize("options", [{"tools": []}, {"tool_choice": "none"}], ids=str)
def test_no_tool_is_called_that_was_not_offered(call_tools, options):
    said, reason = call_tools(lambda text, tools: {"name": "say", "arguments": {}}, **options)
    assert texts_of(said) == solo(CHAT_PROMPT, 8)[0] and not said[0].tool_calls
    assert reason == "length"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_tool_calls_the_first_one_ends_the_answer(call_tools, stream):
    options = {"max_tokens": 64, "stream": stream, "parallel_tool_calls": False}
    said, reason = call_tools(lambda text, tools: {"name": "say", "arguments": {}}, **options)
    assert len([call for message in said for call in message.tool_calls or ()]) == 1
    assert reason == "tool_calls"
    assert texts_of(said) == solo(CHAT_PROMPT, 64)[0].partition("# ")[0].strip()


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


@pytest.mark.slow
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
    assert texts == [written(prompt, 12) for prompt in prompts]


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
        with socket.create_connection(server.address) as connection:
            head = f"{POST}Content-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            wait_until(lambda: metric(server, "mlx_paged_kv_blocks_in_use") > 0)
    wait_until(lambda: metric(server, "mlx_paged_kv_blocks_in_use") == 0)
    assert metric(server, "mlx_paged_generation_tokens_total") - generated < 1400
    wait_until(
        lambda: (
            (metric(server, 'mlx_paged_completions_total{finish_reason="abort"}') or 0) > aborted
        )
    )


@pytest.mark.slow
def test_a_client_that_says_more_than_it_should_is_still_answered(server):
    body = json.dumps(LONG | {"max_tokens": 300, "stream": True}).encode()
    with socket.create_connection(server.address, TIMEOUT) as connection:
        head = f"{POST}Content-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        connection.recv(1)
        connection.sendall(b"more")
        seen = b""
        while b"[DONE]" not in seen:
            seen += connection.recv(1 << 16) or pytest.fail("the stream ended")


READER = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
headers = {"Content-Type": "application/json"}
connection.request("POST", "/v1/completions", sys.argv[2], headers)
for line in connection.getresponse():
    if line.startswith(b"data: "):  # not a comment that says it waits
        print(line, flush=True)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stopped", [False, True], ids=["reading", "reading no more"])
def test_clients_killed_in_the_middle_of_their_streams_leave_nothing(server, stopped):
    """No handler of a client runs after SIGKILL: only the kernel closes the connection."""
    aborts = 'mlx_paged_completions_total{finish_reason="abort"}'
    generated, aborted = metric(server, "mlx_paged_generation_tokens_total"), metric(server, aborts)
    command = [sys.executable, "-c", READER, str(server.address[1])]
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


FIELDS = {
    "min_tokens": ({"min_tokens": 30, "logit_bias": {"1791": 100}}, 31),
    "ignore_eos": ({"ignore_eos": True, "logit_bias": {"1791": 100}}, 40),
    "the end": ({"logit_bias": {"1791": 100}}, 1),
}


@pytest.mark.parametrize(("options", "num_tokens"), FIELDS.values(), ids=FIELDS)
def test_the_end_of_sequence_token_ends_the_text_when_it_may(server, options, num_tokens):
    status, _, answer = post(server, {"prompt": CODE, "max_tokens": 40} | options)
    assert status == 200 and answer["usage"]["completion_tokens"] == num_tokens


def test_stop_tokens_end_the_text(server):
    text, tokens = written(CODE, 24), solo(CODE, 24)[1]
    end = next(i for i in range(4, 24) if tokens[i] not in tokens[:i])
    body = {"prompt": CODE, "max_tokens": 24, "stop_token_ids": [tokens[end]]}
    _, _, answer = post(server, body)
    assert answer["usage"]["completion_tokens"] == end + 1
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert text.startswith(answer["choices"][0]["text"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_prompts_gets_its_choices(openai_client, stream):
    prompts = [CODE, "import os\n", "class Stack:\n"]
    answer = openai_client.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=12, echo=True, stream=stream
    )
    texts = [""] * 6
    for choice in (p.choices[0] for p in answer) if stream else answer.choices:
        texts[choice.index] += choice.text
    assert texts == [prompt + written(prompt, 12) for prompt in prompts for _ in range(2)]
    if not stream:
        tokens = [demo()[1].encode(prompt) for prompt in prompts]
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
        assert answer.usage.completion_tokens == 6 * 12
        same = openai_client.completions.create(model=MODEL, prompt=tokens, n=2, max_tokens=12)
        found = [choice.text for choice in same.choices]
        assert found == [written(prompt, 12) for prompt in prompts for _ in range(2)]


def test_the_likeliest_of_several_is_returned(openai_client):
    options = {"model": MODEL, "prompt": CODE, "max_tokens": 12, "temperature": 1.0, "seed": 6}
    all_four = openai_client.completions.create(n=4, logprobs=0, **options).choices
    means = [fmean(choice.logprobs.token_logprobs) for choice in all_four]
    likeliest = max(range(4), key=means.__getitem__)
    (best,) = openai_client.completions.create(best_of=4, **options).choices
    assert (best.text, best.index) == (all_four[likeliest].text, 0) and likeliest != 0


def test_a_salt_keeps_prefixes_apart(openai_client):
    def cached(salt):
        answer = openai_client.completions.create(
            model=MODEL, prompt=CODE * 8, max_tokens=1, extra_body={"cache_salt": salt}
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("a") > 0, cached("a") > 0, cached("b") > 0] == [False, True, False]


def test_the_last_message_is_continued():
    messages = [*CHAT, {"role": "assistant", "content": "    return"}]
    template = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ '#' if add_generation_prompt }}"
    )
    body = {"messages": messages, "max_tokens": 8, "continue_final_message": True}
    with live("--chat-template", template) as server:
        _, _, answer = post(server, body, "/v1/chat/completions")
    expected = written("def add(a, b):\n    return", 8)
    assert expected[0] == " "
    assert answer["choices"][0]["message"]["content"] == expected
