"""The field `cache` in all APIs: what is kept, dropped and refused."""

import pytest

from mlx_paged.sampling_params import WEEK
from tests.support.commands.server_harness import TEMPLATE, live, only_model, post

PATHS = {
    "/v1/completions": lambda tokens: {"prompt": tokens},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
}


@pytest.fixture(scope="module")
def server():
    with live("--max-context", "128", "--chat-template", TEMPLATE) as server:
        yield server


def ask(server, path, text, **fields):
    most = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    return post(server, PATHS[path](text) | {most: 2} | fields, path)


def allocator(server):
    return only_model(server).service._engine.scheduler.allocator


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("retain", ["pin", 3600])
def test_a_wish_is_told_in_the_usage(server, path, retain):
    text = f"def f(x): return {retain!r} {path} " * 2
    status, _, body = ask(server, path, text, cache={"retain": retain})
    assert status == 200
    usage = body["usage"]
    num_prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    num_prompt += usage.get("cache_read_input_tokens", 0)
    assert usage["cache"]["reason"] is None
    # The last token of the answer is in no pool, and so are up to 3 tokens of a block begun.
    assert num_prompt - 3 <= usage["cache"]["pinned_tokens"] <= num_prompt + 1
    assert allocator(server).store.idle.num_pinned > 0
    assert allocator(server).retention.forget_all(b"") > 0


@pytest.mark.parametrize("path", PATHS)
def test_without_a_wish_nothing_is_told(server, path):
    for fields in ({}, {"cache": {}}, {"cache": {"retain": None}}, {"cache": {"retain": "drop"}}):
        status, _, body = ask(server, path, "def g(x): pass", **fields)
        assert status == 200 and "cache" not in body["usage"]


def test_a_wish_that_is_not_granted_is_no_error(server):
    pins = allocator(server).store.idle.pins
    pins.share, before = 0.0, pins.share
    try:
        pins.set_size(1000)
        status, _, body = ask(server, "/v1/completions", [5] * 40, cache={"retain": "pin"})
    finally:
        pins.share = before
        pins.set_size(allocator(server).num_blocks)
    assert status == 200
    assert body["usage"]["cache"] == {"pinned_tokens": 0, "reason": "max_pinned"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "cache",
    [
        "pin",
        [],
        {"keep": 1},
        {"retain": float("nan")},
        {"retain": "p\u0456n"},
        {"retain": "x" * 10**6},
        {f"k{i}": 1 for i in range(999)},
        *({"retain": x} for x in ("keep", -1, WEEK + 1, True, 10**400, [1])),
    ],
    ids=lambda cache: repr(cache)[:30],
)
def test_another_wish_is_refused(server, path, cache):
    status, _, body = ask(server, path, "x", cache=cache)
    assert status == 400 and "cache" in body["error"]["message"]


@pytest.mark.parametrize("share", ["0", "0.5"])
def test_the_share_of_an_owner_is_a_flag(share):
    with live("--max-context", "128", "--max-pinned", share) as server:
        assert allocator(server).store.idle.pins.share == float(share)
        usage = ask(server, "/v1/completions", [5] * 40, cache={"retain": "pin"})[2]["usage"]
        assert usage["cache"]["reason"] == ("max_pinned" if share == "0" else None)
