"""Fields that raise the worth of K/V up to a breakpoint, in the APIs that have them."""

import pytest

from tests.server.test_cache_field import ask
from tests.support.commands.server_harness import TEMPLATE, live, only_model, post

LONG = "def number_{}(a, b): return a + b\n"


@pytest.fixture(scope="module")
def server():
    flags = "--max-context", "400", "--kv-block-size", "8", "--chat-template", TEMPLATE
    with live(*flags) as server:
        yield server


def marked(server) -> list[float]:
    """The times of the marks of all known blocks; then all are forgotten."""
    model = only_model(server)

    def read(engine):
        allocator = engine.scheduler.allocator
        known = [*allocator.store.prefixes[0].by_block.values()]
        found = [each.marked_s for each in known]
        allocator.retention.forget_all(b"")
        return found

    return sorted(model.service.call(read))


def messages(server, **fields):
    return post(server, {"max_tokens": 1} | fields, "/v1/messages")


def text(number, **more):
    return {"type": "text", "text": LONG.format(number) * 2} | more


CONTROL = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    ("path", "retention", "seconds"),
    [
        (path, *each)
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/completions")
        for each in (("in_memory", 600), ("in-memory", 600), ("24h", 86400))
    ],
)
def test_a_retention_marks_the_prompt(server, path, retention, seconds):
    status, *_ = ask(server, path, LONG * 2, prompt_cache_retention=retention)
    found = marked(server)
    assert status == 200 and len(found) > 2 and {*found[1:]} == {seconds}
    ask(server, path, LONG * 2, prompt_cache_retention=None, prompt_cache_key="k")
    assert {*marked(server)} == {0}


def test_breakpoints_mark_what_is_before_them(server):
    user = {"role": "user", "content": [text(2), text(3)]}
    usual = messages(server, system=[text(0), text(1)], messages=[user])
    assert usual[0] == 200
    num_blocks = len(marked(server))
    for system, content, part in (
        ([text(0, **CONTROL), text(1)], [text(2), text(3)], 0.25),
        ([text(0), text(1, **CONTROL)], [text(2), text(3)], 0.5),
        ([text(0), text(1)], [text(2, **CONTROL), text(3)], 0.75),
        ([text(0), text(1)], [text(2), text(3, **CONTROL)], 1),
    ):
        user = {"role": "user", "content": content}
        status, _, body = messages(server, system=system, messages=[user])
        found = marked(server)
        assert status == 200 and len(found) == num_blocks, "the prompt is the same"
        assert found.count(300.0) == pytest.approx(part * num_blocks, abs=1.5)
        assert body["usage"]["cache_read_input_tokens"] == 0


def test_both_times_to_live_and_the_counts_of_tokens(server):
    user = {"role": "user", "content": [text(2, **CONTROL)]}
    body = {"system": [text(0, **HOUR), text(1)], "messages": [user]}
    first = messages(server, **body)[2]["usage"]
    again = messages(server, **body)[2]["usage"]
    found = marked(server)
    assert {300.0, 3600.0} <= {*found} and found.count(300.0) > 2 < found.count(3600.0)
    assert first["cache_creation_input_tokens"] == again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] + again["input_tokens"] == first["input_tokens"]
    assert again["cache_read_input_tokens"] > 20


def test_a_field_of_the_request_marks_all(server):
    messages(server, messages=[{"role": "user", "content": LONG * 3}], **HOUR)
    assert {*marked(server)[1:]} == {3600.0}


BAD = ["ephemeral", {}, {"type": "forever"}, [], 1, True, {"type": ["ephemeral"]}]
BAD += [{"type": "ephemeral", "ttl": ttl} for ttl in ("5M", "", 5, 300.0, [], {}, "x" * 10**5)]


@pytest.mark.parametrize("control", BAD, ids=lambda value: repr(value)[:30])
def test_another_cache_control_is_refused_by_name(server, control):
    wrong = {"cache_control": control}
    user = [{"role": "user", "content": [text(1)]}]
    for name, fields in {
        "cache_control": wrong,
        "system[0].cache_control": {"system": [text(1, **wrong)]},
        "messages[0].content[0].cache_control": {
            "messages": [{"role": "user", "content": [text(1, **wrong)]}]
        },
        "tools[0].cache_control": {"tools": [{"name": "f", "input_schema": {}} | wrong]},
    }.items():
        status, _, body = messages(server, **{"messages": user} | fields)
        assert status == 400 and body["error"]["message"].startswith(name)
        assert len(body["error"]["message"]) < 400


def test_five_breakpoints_are_too_many(server):
    blocks = [text(i, **CONTROL) for i in range(5)]
    status, _, body = messages(server, messages=[{"role": "user", "content": blocks}])
    assert status == 400 and "at most 4" in body["error"]["message"]


@pytest.mark.parametrize("value", ["5m", "", 24, True, [], {}, "24H", "\u0662\u0664h"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_another_retention_is_refused_by_name(server, path, value):
    status, _, body = ask(server, path, "x", prompt_cache_retention=value)
    assert status == 400 and body["error"]["message"].startswith("prompt_cache_retention: ")
