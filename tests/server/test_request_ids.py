"""Token ids in requests of each API name tokens that the model has, or the answer is 400."""

import pytest

from tests.support.commands.server_harness import post

pytest_plugins = ["tests.support.commands.server_fixtures"]

VOCAB = 1792  # of the demo model
OUTSIDE = [VOCAB, 34_000, 5_000_000, 200_000_000, 2**31 - 1, 3_000_000_000, 2**40 + 5, 10**30]
CHAT = [{"role": "user", "content": "x = "}]
APIS = {
    "/v1/completions": {"prompt": "x = ", "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "x = ", "max_output_tokens": 4},
}
FIELDS = {
    "stop_token_ids": lambda token: {"stop_token_ids": [5, token]},
    "logit_bias": lambda token: {"logit_bias": {"5": 1, str(token): 100}},
}


@pytest.fixture(params=["", "min_tokens"])
def beside(request):
    """Options that make the server forbid the tokens that end a text."""
    return {"min_tokens": 2} if request.param else {}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("token", OUTSIDE)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("path", APIS)
def test_options_outside_the_vocabulary_are_refused_by_name(server, path, field, token, beside):
    status, _, answer = post(server, APIS[path] | FIELDS[field](token) | beside, path)
    assert status == 400 and answer["error"]["message"].startswith(field), answer
    assert answer["error"].get("param", field) == field
    status, _, _ = post(server, APIS[path] | FIELDS[field](VOCAB - 1) | beside, path)
    assert status == 200


PROMPTS = [[[1, 2], [3, "?"]], [1, "?"], ["?"]]


@pytest.mark.parametrize("token", [-1, -(10**30), *OUTSIDE])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["second of two", "last", "alone"])
@pytest.mark.parametrize("options", [{}, {"echo": True}, {"echo": True, "logprobs": 1}], ids=str)
def test_prompts_outside_the_embedding_are_refused_by_name(server, prompt, token, options):
    made = [
        [token if t == "?" else t for t in p] if isinstance(p, list) else (token if p == "?" else p)
        for p in prompt
    ]
    status, _, answer = post(server, {"prompt": made, "max_tokens": 2} | options)
    assert status == 400 and answer["error"]["param"] == "prompt", answer
    assert f"prompt has token {token}" in answer["error"]["message"]


@pytest.mark.parametrize("token", [VOCAB, 5_000_000])
def test_a_grammar_that_demands_a_token_outside_is_refused(server, token):
    body = {"prompt": "a", "structured_outputs": {"grammar": f"start: <[{token}]>"}}
    status, _, answer = post(server, body | {"max_tokens": 4})
    assert status == 400 and "structured_outputs" in answer["error"]["message"], answer
    assert post(server, {"prompt": "a", "max_tokens": 2})[0] == 200
