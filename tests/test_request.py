"""What a request may ask for, and the numbers that follow from its tokens."""

import pytest

from mlx_paged.request import FinishReason, Request
from mlx_paged.sampling_params import SamplingParams

INF, NAN = float("inf"), float("nan")

BAD_VALUES = [
    ("max_tokens", 0, "an integer >= 1"),
    ("max_tokens", -1, "an integer >= 1"),
    ("max_tokens", 1.5, "an integer >= 1"),
    ("max_tokens", True, "an integer >= 1"),
    ("temperature", -0.1, ">= 0 and finite"),
    ("temperature", INF, ">= 0 and finite"),
    ("temperature", NAN, ">= 0 and finite"),
    ("top_p", -0.1, "from 0 to 1"),
    ("top_p", 1.1, "from 0 to 1"),
    ("top_p", NAN, "from 0 to 1"),
    ("top_k", -1, "an integer >= 0"),
    ("top_k", 2.5, "an integer >= 0"),
    ("top_k", False, "an integer >= 0"),
    ("min_p", -0.1, "from 0 to 1"),
    ("min_p", 1.1, "from 0 to 1"),
    ("min_p", NAN, "from 0 to 1"),
    ("seed", -1, "an integer in [0, 2**64)"),
    ("seed", 2**64, "an integer in [0, 2**64)"),
    ("seed", 0.5, "an integer in [0, 2**64)"),
    ("seed", True, "an integer in [0, 2**64)"),
    ("stop", ("",), "non-empty strings"),
    ("stop", ("end", 7), "non-empty strings"),
]


def request(prompt: list[int], **options: object) -> Request:
    return Request(id=0, tokens=prompt, params=SamplingParams(**options), seed=0)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    BAD_VALUES,
    ids=[f"{field}={value}" for field, value, _ in BAD_VALUES],
)
def test_a_value_out_of_range_is_named_with_its_range(field, value, expected):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    assert str(error.value) == f"[SamplingParams] {field} is {value!r}: expected {expected}"


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 1e6},
        {"top_p": 0},
        {"top_p": 1},
        {"top_k": 0},
        {"top_k": 10**9},
        {"min_p": 0},
        {"min_p": 1},
        {"seed": 0},
        {"seed": 2**64 - 1},
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_allowed(options):
    params = SamplingParams(**options)
    assert {name: getattr(params, name) for name in options} == options


def test_by_default_the_most_likely_token_of_an_unfiltered_distribution_is_taken():
    params = SamplingParams()
    assert params.temperature == 0
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert params.stop == () and params.stop_token_ids == frozenset()


def test_a_single_stop_string_is_not_taken_for_its_letters():
    assert SamplingParams(stop="end").stop == ("end",)


def test_stop_strings_and_tokens_may_come_in_any_collection():
    params = SamplingParams(stop=["\n\n", "end"], stop_token_ids=[3, 3, 5])
    assert params.stop == ("\n\n", "end")
    assert params.stop_token_ids == frozenset({3, 5})


def test_params_cannot_change_while_a_request_runs():
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 7


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


def test_a_request_is_finished_once_it_has_a_reason():
    running = request([7])
    assert not running.is_finished
    running.finish_reason = FinishReason.LENGTH
    assert running.is_finished


def test_requests_do_not_share_their_log_probabilities():
    first, second = request([1]), request([1])
    first.logprobs.append(-0.5)
    assert second.logprobs == []


def test_reasons_are_words_in_json():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort"]
