"""A request with many prompts takes its share of the places, and others pass between."""

import json
import threading

import pytest

from mlx_paged.protocol.choices import CompletionChoice
from tests.support.commands.server_harness import CODE, exchange, only_model, post, written

pytest_plugins = ["tests.support.commands.server_fixtures"]
FLAGS = "--decode-concurrency", "2", "--max-queue", "2", "--max-prompts", "6"
MANY = {"prompt": [CODE, "class A", "import os", "x = 1", "if x", "for i"], "max_tokens": 8}


@pytest.mark.parametrize(
    ("more", "field", "flag"),
    [
        ({"prompt": ["a"] * 7}, "prompt", "--max-prompts 6"),
        ({"prompt": ["a"] * 4, "n": 2}, "prompt", "--max-prompts 6"),
        ({"prompt": [[5]] * 60_000}, "prompt", "--max-prompts 6"),
        ({"prompt": "a", "n": 5}, "n", "--decode-concurrency and --max-queue"),
        ({"prompt": "a", "n": 1, "best_of": 5}, "best_of", "--decode-concurrency"),
    ],
    ids=["prompts", "samples", "ids", "n", "best_of"],
)
def test_what_can_never_fit_is_refused_at_once(server, more, field, flag):
    for stream in (False, True) if field != "best_of" else (False,):
        status, headers, answer = post(server, {"max_tokens": 1, "stream": stream} | more)
        assert status == 400 and headers["Retry-After"] is None
        assert answer["error"]["param"] == field and flag in answer["error"]["message"]


def test_all_prompts_are_answered_with_few_in_the_engine_at_a_time(server, monkeypatch):
    most, whole = 0, CompletionChoice.add

    def noted(self, output):
        nonlocal most
        most = max(most, len(only_model(server).service._open))
        return whole(self, output)

    monkeypatch.setattr(CompletionChoice, "add", noted)
    status, _, answer = post(server, MANY)
    assert status == 200 and most == 2
    texts = [choice["text"] for choice in answer["choices"]]
    alone = [post(server, MANY | {"prompt": each})[2] for each in MANY["prompt"]]
    assert texts == [each["choices"][0]["text"] for each in alone]
    assert texts[0] == written(CODE, 8)
    assert answer["usage"]["completion_tokens"] == 6 * 8


def test_others_pass_between_the_prompts_of_a_request(server, monkeypatch):
    """The places would be full if all prompts had some. This other request ends first."""
    ended = []

    def many():
        ended.append(post(server, MANY | {"max_tokens": 300, "n": 1, "ignore_eos": True})[0])

    thread = threading.Thread(target=many)
    thread.start()
    while only_model(server).taken < 2:
        pass
    status, _, answer = post(server, {"prompt": CODE, "max_tokens": 4})
    assert (status, ended) == (200, []), answer
    thread.join()
    assert ended == [200]


def test_a_wrong_prompt_is_refused_before_any_is_computed(server):
    good = [[5, 6]] * 5
    for wrong in ([10**6], []):
        for stream in (False, True):
            body = {"prompt": [*good, wrong], "max_tokens": 1, "stream": stream}
            status, _, answer = post(server, body)
            assert status == 400 and answer["error"]["param"] == "prompt"


def test_log_probabilities_are_described_beside_the_event_loop(server, monkeypatch):
    threads, whole = set(), CompletionChoice._described

    def noted(self, *given):
        threads.add(threading.current_thread().name)
        return whole(self, *given)

    monkeypatch.setattr(CompletionChoice, "_described", noted)
    for stream in (False, True):
        body = json.dumps({"prompt": "a", "max_tokens": 3, "logprobs": 20, "stream": stream})
        assert exchange(server, "POST", "/v1/completions", body)[0] == 200
    assert threads and all("ThreadPool" in name for name in threads), threads
