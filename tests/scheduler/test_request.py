"""The counts that a request derives from its tokens."""

from mlx_paged.request import FinishReason, Request
from mlx_paged.sampling_params import SamplingParams


def request(prompt: list[int], **options: object) -> Request:
    return Request(id=0, tokens=prompt, params=SamplingParams(**options), seed=0)


def test_tokens_after_the_prompt_are_the_generated_ones():
    running = request([7, 8, 9])
    running.tokens += [1, 2]
    assert running.num_prompt == 3
    assert running.generated == [1, 2] and running.num_generated == 2


def test_pending_tokens_are_those_without_kv():
    running = request([7, 8, 9])
    assert running.num_pending == 3
    running.num_computed = 3
    running.tokens.append(1)
    assert running.num_pending == 1


def test_the_last_generated_token_needs_no_kv_slot():
    assert request([7, 8, 9], max_tokens=1).max_kv_tokens == 3
    assert request([7, 8, 9], max_tokens=5).max_kv_tokens == 7


def test_requests_do_not_share_their_log_probabilities():
    first, second = request([1]), request([1])
    first.logprobs.append(-0.5)
    assert second.logprobs == []


def test_reasons_are_words_in_json():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]
