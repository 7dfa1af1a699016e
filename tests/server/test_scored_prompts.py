"""Log-probabilities of prompts over HTTP, as lm-evaluation-harness and vLLM's clients ask."""

import json
from itertools import accumulate

import pytest

from tests.support.commands.server_harness import (
    CODE,
    MODEL,
    demo,
    exchange,
    post,
    solo,
    written,
)
from tests.support.engine.mlx_lm_scores import (
    CONTEXTS,
    ENDS,
    likeliest,
    loglikelihoods,
    scores_of,
)

pytest_plugins = ["tests.support.commands.server_fixtures"]
PROMPT = CODE * 3 + "    return 0\n"


def streamed(server, body):
    """The choice of each packet that has log-probabilities."""
    _, _, content = exchange(server, "POST", "/v1/completions", json.dumps(body | {"stream": True}))
    lines = [line.removeprefix("data: ") for line in content.decode().splitlines()]
    packets = [json.loads(line)["choices"][0] for line in lines if line.startswith("{")]
    return [packet for packet in packets if packet["logprobs"]]


def assert_scored(choice, prompt, top):
    """The choice has mlx-lm's log-probabilities of the prompt's tokens, in OpenAI's form."""
    tokens = demo()[1].encode(prompt)
    found, count = choice["logprobs"], len(tokens)
    assert "".join(found["tokens"][:count]) == prompt
    lengths = [len(token) for token in found["tokens"][:count]]
    assert found["text_offset"][:count] == list(accumulate(lengths[:-1], initial=0))
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:count] == pytest.approx(
        scores_of(demo()[0], tokens)[0], abs=1e-4
    )
    expected = [[demo()[1].decode([t]) for t in row] for row in likeliest(demo()[0], tokens, top)]
    assert [[*each] for each in found["top_logprobs"][1:count]] == expected


def test_the_bytes_of_tokens_join_to_their_text(server):
    """Also those of tokens that are parts of a character, beside tokens of several bytes."""
    prompt = "return é🙂b 日本"
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
    (choice,) = post(server, body)[2]["choices"]
    entries = choice["logprobs"]["content"]
    count = len(demo()[1].encode(prompt))
    assert count < len(prompt.encode())
    assert sum(entry["token"] == "\ufffd" for entry in entries[:count]) > len("é🙂日本")
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:count]) == prompt.encode()
    for entry in entries + [top for each in entries for top in each["top_logprobs"]]:
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]


def test_a_prompt_alone_is_scored(server):
    """Even if the token after it would end the text."""
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
    for options in ({}, {"logit_bias": {"1791": 100}}):
        status, _, answer = post(server, body | options)
        (choice,) = answer["choices"]
        assert (status, choice["text"], choice["finish_reason"]) == (200, PROMPT, "length")
        assert_scored(choice, PROMPT, 1)
        assert len(choice["logprobs"]["tokens"]) == answer["usage"]["total_tokens"]
        assert answer["usage"]["completion_tokens"] == 0


def test_a_client_gets_the_prompt_and_the_completion(openai_client):
    options = {"model": MODEL, "prompt": [PROMPT, CODE], "n": 2, "max_tokens": 5}
    answer = openai_client.completions.create(echo=True, logprobs=3, **options)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(answer.choices, [PROMPT, PROMPT, CODE, CODE], strict=True):
        _, tokens, logprobs = solo(prompt, 5)
        assert choice.text == prompt + written(prompt, 5)
        assert_scored(choice.to_dict(), prompt, 3)
        assert choice.logprobs.token_logprobs[-5:] == pytest.approx(logprobs, abs=1e-4)
        assert len(choice.logprobs.tokens) == len(demo()[1].encode(prompt)) + len(tokens)


@pytest.mark.parametrize(
    "prompt", ["def é中😀  x = 'ü'\n", "😀中", "  é  é", [220, 127, 102, 160]], ids=repr
)
def test_offsets_are_those_of_the_answers_text(server, prompt):
    """Also where several tokens are one character, where a space is held back, and at the end."""
    body = {"guided_choice": ["é中😀  y ü"], "max_tokens": 40, "logprobs": 0, "prompt": prompt}
    _, _, answer = post(server, body | {"echo": True})
    (choice,) = answer["choices"]
    text, found = choice["text"], choice["logprobs"]
    starts = found["text_offset"]
    assert starts[0] == 0 and starts == sorted(starts) and starts[-1] == len(text)
    whole = "".join(text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True))
    assert whole == text and text.endswith("é中😀  y ü")
    parts = 0  # of characters
    for token, start in zip(found["tokens"][:-1], starts, strict=False):
        parts += token == "\ufffd"
        assert token == "\ufffd" or text.startswith(token, start)
    assert parts > sum(map(text.count, "é中😀ü")) > 0
    packets = streamed(server, body)
    offsets = [at for packet in packets for at in packet["logprobs"]["text_offset"]]
    first = len(prompt if isinstance(prompt, str) else demo()[1].decode(prompt))
    assert [first + at for at in offsets] == starts[-len(offsets) :]


def test_lm_evaluation_harness_gets_mlx_lms_log_likelihoods(server):
    """What its `local-completions` sends, and how it reads the answer."""
    model, tokenizer = demo()
    pairs = [(context, end) for context in CONTEXTS for end in ENDS]
    prompts = [tokenizer.encode(context + end) for context, end in pairs]
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1}
    _, _, answer = post(server, body | {"logprobs": 1, "seed": 1234, "echo": True})
    found = []
    for choice, (context, _) in zip(answer["choices"], pairs, strict=True):
        first = len(tokenizer.encode(context))
        own = choice["logprobs"]["token_logprobs"][first:-1]
        best = [max(each.values()) for each in choice["logprobs"]["top_logprobs"][first:-1]]
        found.append((sum(own), own == best))
    expected = loglikelihoods(model, tokenizer, pairs)
    assert [g for _, g in found] == [g for _, g in expected]
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], abs=1e-3)


def test_prompt_logprobs_have_vllms_form(server):
    tokens = demo()[1].encode(PROMPT)
    status, _, answer = post(server, {"prompt": PROMPT, "max_tokens": 2, "prompt_logprobs": 2})
    (choice,) = answer["choices"]
    first, *others = choice["prompt_logprobs"]
    assert (status, first, choice["logprobs"]) == (200, None, None)
    assert choice["text"] == written(PROMPT, 2)
    expected, is_greedy = scores_of(demo()[0], tokens)
    for token, entry, logprob, greedy in zip(tokens[1:], others, expected, is_greedy, strict=True):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert own["decoded_token"] == demo()[1].decode([token])
        assert (own["rank"] == 1) == greedy
        assert {1, 2} <= {each["rank"] for each in entry.values()} and len(entry) in (2, 3)


REFUSED = {
    "a stream": ({"echo": True, "logprobs": 1, "stream": True}, "stream: expected false beside"),
    "a stream of them": ({"prompt_logprobs": 1, "stream": True}, "stream: expected false beside"),
    "no tokens": ({"max_tokens": 0}, "max_tokens: expected 1 or more without echo"),
    "many": ({"prompt_logprobs": 21}, "prompt_logprobs: expected from 0 to 20"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_had_is_refused_by_name(server, options, message):
    status, _, answer = post(server, {"prompt": "a"} | options)
    assert status == 400 and message in answer["error"]["message"]
    assert answer["error"]["param"] == message.partition(":")[0]


def test_chats_have_none(server):
    body = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1}
    status, _, answer = post(server, body, "/v1/chat/completions")
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
