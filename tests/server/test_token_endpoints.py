"""Prompts as token ids, token ids as text, chats as text, and what a request would cost."""

import pytest

from mlx_paged.engine.estimates import estimate
from mlx_paged.protocol import prompts
from tests.support.commands.server_harness import TEMPLATE, demo, live, only_model, post

LIMIT = 96
TEXT = "def main(x: int) -> str:\n    return 'é'"
TURNS = [{"role": "user", "content": "x = 1"}, {"role": "assistant", "content": "y"}]
RENDERED = "user: x = 1\nassistant: y\n"


@pytest.fixture(scope="module")
def server():
    with live("--max-context", str(LIMIT), "--chat-template", TEMPLATE) as server:
        yield server


def answer(server, path, **body):
    status, _, content = post(server, body, path)
    assert status == 200, content
    return content


def refusal(server, path, body):
    status, _, content = post(server, body, path)
    assert status == 400, content
    return content["error"]["message"]


def test_a_text_is_encoded_as_the_tokenizer_does(server):
    tokenizer = demo()[1]
    plain = tokenizer.encode(TEXT, add_special_tokens=False)
    whole = tokenizer.encode(TEXT)
    assert answer(server, "/tokenize", content=TEXT)["tokens"] == plain
    assert answer(server, "/tokenize", content=TEXT, add_special=True)["tokens"] == whole
    assert answer(server, "/tokenize", prompt=TEXT, add_special_tokens=False)["tokens"] == plain
    found = answer(server, "/tokenize", prompt=TEXT, return_token_strs=True)
    assert found["tokens"] == whole and found["max_model_len"] == LIMIT
    assert found["count"] == len(found["token_strs"]) == len(whole)


def test_a_text_beyond_the_context_is_counted_and_a_huge_one_refused(server):
    found = answer(server, "/tokenize", content="a b " * 80)
    assert found["count"] > LIMIT
    huge = "a" * (LIMIT * only_model(server).longest_token + 1)
    assert "which may fit into the context" in refusal(server, "/tokenize", {"content": huge})


@pytest.mark.parametrize("path", ["/tokenize", "/v1/estimate", "/v1/completions"])
def test_a_long_text_that_cannot_fit_is_not_encoded_as_a_whole(server, monkeypatch, path):
    """A tokenizer takes hundreds of bytes for each token, and a text may have a token a byte."""
    model, sizes = only_model(server), []
    encode = model.tokenizer.encode

    def seen(text, **options):
        sizes.append(len(text))
        return encode(text, **options)

    monkeypatch.setitem(vars(model.tokenizer), "encode", seen)
    monkeypatch.setattr(model, "longest_token", 10**6)
    text = "~!" * prompts.LONG
    if path == "/v1/estimate":
        assert answer(server, path, prompt=text)["fits"] is False
    else:
        assert "context" in refusal(server, path, {"prompt": text, "max_tokens": 1})
    assert sizes and sum(sizes) <= 2 * prompts.PIECE


def test_a_long_text_that_fits_is_encoded_as_a_whole(server, monkeypatch):
    plain = demo()[1].encode(TEXT)
    for name, value in {"LONG": 1, "SPARSE": 0, "PIECE": 7}.items():
        monkeypatch.setattr(prompts, name, value)
    assert answer(server, "/tokenize", prompt=TEXT)["tokens"] == plain
    usage = answer(server, "/v1/completions", prompt=TEXT, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == len(plain)


def test_a_chat_is_encoded_as_a_request_for_an_answer_is(server):
    found = answer(server, "/tokenize", messages=TURNS)
    body = {"messages": TURNS, "max_tokens": 1}
    usage = answer(server, "/v1/chat/completions", **body)["usage"]
    assert found["count"] == usage["prompt_tokens"]
    assert answer(server, "/detokenize", tokens=found["tokens"])["prompt"] == RENDERED
    assert answer(server, "/apply-template", messages=TURNS) == {"prompt": RENDERED}


def test_tokens_are_decoded_as_the_tokenizer_does(server):
    tokens = demo()[1].encode(TEXT, add_special_tokens=False)
    found = answer(server, "/detokenize", tokens=tokens)
    assert found == {"content": TEXT, "prompt": TEXT}


def test_an_estimate_counts_what_the_pool_has(server):
    prompt = [7] * 49
    first = answer(server, "/v1/estimate", prompt=prompt)
    assert first["fits"] and (first["tokens"], first["cached_tokens"]) == (49, 0)
    answer(server, "/v1/completions", prompt=prompt, max_tokens=1)
    second = answer(server, "/v1/estimate", prompt=prompt)
    assert second["cached_tokens"] == 48 and second["tokens_ahead"] == 0
    assert second["first_token_s"] > 0
    salted = answer(server, "/v1/estimate", prompt=prompt, cache_salt="another")
    assert salted["cached_tokens"] == 0 and salted["first_token_s"] > second["first_token_s"]
    usage = answer(server, "/v1/completions", prompt=prompt, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == second["cached_tokens"]


def test_an_estimate_says_that_a_prompt_does_not_fit(server):
    found = answer(server, "/v1/estimate", prompt=[7] * (LIMIT + 1))
    assert found == {"tokens": LIMIT + 1, "max_model_len": LIMIT, "fits": False}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"content": 3}, "text or token ids"),
        ("/tokenize", {"content": ["a", "b"]}, "expected one prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "expected a text"),
        ("/tokenize", {"content": "a", "add_special": 1}, "add_special: expected true or false"),
        ("/tokenize", {"content": "a", "with_pieces": True}, "with_pieces: expected false"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special: expected true"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": "abc"}, "expected a list of token ids"),
        ("/detokenize", {"tokens": [-1]}, "token -1"),
        ("/detokenize", {"tokens": [2**70]}, f"token {2**70}"),
        ("/detokenize", {"tokens": [True]}, "prompt"),
        ("/detokenize", {"tokens": []}, "prompt"),
        ("/detokenize", {"tokens": [1] * (LIMIT + 1)}, f"at most {LIMIT} ids"),
        ("/apply-template", {"prompt": "a"}, "messages"),
        ("/v1/estimate", {"prompt": ["a", "b"]}, "expected one prompt"),
    ],
)
def test_a_mistake_is_named(server, path, body, message):
    assert message in refusal(server, path, body)


def test_a_field_without_effect_is_told(server):
    _, headers, _ = post(server, {"content": "a", "colour": "red"}, "/tokenize")
    assert headers["x-ignored-fields"] == "colour"


def test_an_estimate_counts_prompts_that_run_and_wait(server):
    prompts = [[9] * 40, [11] * 50]

    def ahead(engine):
        ids = [engine.add_request(prompt, max_tokens=8) for prompt in prompts]
        before = estimate(engine, [7, 8], "")
        while len(engine.scheduler.running) < 2:
            engine.step()
        engine.settle()
        after = estimate(engine, [7, 8], "")
        for each in ids:
            engine.abort(each)
        return before.tokens_ahead, after.tokens_ahead

    assert only_model(server).service.call(ahead) == (90, 0)
