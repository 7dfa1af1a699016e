"""What a request may ask for."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from mlx_paged.sampling_params import SamplingParams

INF, NAN = float("inf"), float("nan")

BAD_VALUES = [
    ("max_tokens", 0, "an integer >= 1"),
    ("max_tokens", -1, "an integer >= 1"),
    ("max_tokens", 1.5, "an integer >= 1"),
    ("max_tokens", True, "an integer >= 1"),
    ("max_tokens", "9", "an integer >= 1"),
    ("max_tokens", NAN, "an integer >= 1"),
    ("temperature", -0.1, ">= 0 and finite"),
    ("temperature", INF, ">= 0 and finite"),
    ("temperature", NAN, ">= 0 and finite"),
    ("temperature", "1", ">= 0 and finite"),
    ("temperature", True, ">= 0 and finite"),
    ("temperature", 10**400, ">= 0 and finite"),
    ("top_p", -0.1, "from 0 to 1"),
    ("top_p", 1.1, "from 0 to 1"),
    ("top_p", NAN, "from 0 to 1"),
    ("top_p", "0.9", "from 0 to 1"),
    ("top_p", True, "from 0 to 1"),
    ("top_p", 10**400, "from 0 to 1"),
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
    ("stop", 7, "a collection"),
    ("stop", b"end", "a collection"),
    ("stop_token_ids", 7, "a collection"),
    ("stop_token_ids", "7", "a collection"),
    ("stop_token_ids", b"7", "a collection"),
    ("stop_token_ids", [[7]], "a collection of token ids"),
    ("stop_token_ids", frozenset({"7"}), "token ids >= 0"),
    ("stop_token_ids", frozenset({7.5}), "token ids >= 0"),
    ("stop_token_ids", frozenset({True}), "token ids >= 0"),
    ("stop_token_ids", frozenset({NAN}), "token ids >= 0"),
    ("stop_token_ids", frozenset({-1}), "token ids >= 0"),
    ("xtc_probability", 1.1, "from 0 to 1"),
    ("xtc_probability", NAN, "from 0 to 1"),
    ("xtc_threshold", -0.1, "from 0 to 0.5"),
    ("xtc_threshold", 0.6, "from 0 to 0.5"),
    ("xtc_special_tokens", 7, "a collection"),
    ("xtc_special_tokens", b"7", "a collection"),
    ("xtc_special_tokens", frozenset({-1}), "token ids >= 0"),
    ("xtc_special_tokens", frozenset({"</s>"}), "token ids >= 0"),
    ("repetition_penalty", -0.1, "None, or >= 0 and finite"),
    ("repetition_penalty", INF, "None, or >= 0 and finite"),
    ("repetition_penalty", "1.1", "None, or >= 0 and finite"),
    ("presence_penalty", INF, "None or a finite number"),
    ("presence_penalty", "0.5", "None or a finite number"),
    ("frequency_penalty", NAN, "None or a finite number"),
    ("frequency_penalty", True, "None or a finite number"),
    ("repetition_context_size", -1, "an integer >= 0"),
    ("presence_context_size", 1.5, "an integer >= 0"),
    ("frequency_context_size", None, "an integer >= 0"),
    ("logit_bias", 7, "a collection"),
    ("logit_bias", (7,), "numbers below infinity by token id >= 0"),
    ("logit_bias", ((-1, 1.0),), "numbers below infinity by token id >= 0"),
    ("logit_bias", (("7", 1.0),), "numbers below infinity by token id >= 0"),
    ("logit_bias", ((7, INF),), "numbers below infinity by token id >= 0"),
    ("logit_bias", ((7, NAN),), "numbers below infinity by token id >= 0"),
    ("logit_bias", ((7, "1"),), "numbers below infinity by token id >= 0"),
    ("logit_bias", ((7, 1.0, 2.0),), "numbers below infinity by token id >= 0"),
    ("logits_processors", max, "a collection"),
    ("logits_processors", ("max",), "callables"),
    ("sampler", "greedy", "a callable"),
    ("logit_bias", "", "a collection"),
    ("logit_bias", ((True, 1.0),), "numbers below infinity by token id >= 0"),
    ("logit_bias", ((7, True),), "numbers below infinity by token id >= 0"),
    ("ignore_eos", "no", "True or False"),
    ("ignore_eos", 1, "True or False"),
    ("logprobs", -1, "an integer >= 0"),
    ("logprobs", True, "an integer >= 0"),
]


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
        {"xtc_probability": 1, "xtc_threshold": 0},
        {"xtc_threshold": 0.5},
        {"repetition_penalty": 0},
        {"presence_penalty": -2, "frequency_penalty": -2},
        {"repetition_context_size": 0, "presence_context_size": 10**9},
        {"logit_bias": ((0, -INF),)},
        {"logprobs": 0},
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
    assert params.xtc_probability == 0
    assert params.repetition_penalty is params.presence_penalty is params.frequency_penalty is None
    assert params.logit_bias == () and params.logits_processors == () and params.sampler is None
    assert params.logprobs == 0
    assert params.stop == () and params.stop_token_ids == frozenset()


def test_a_temperature_and_a_sampler_are_not_both_taken():
    with pytest.raises(ValueError, match="expected None beside a temperature"):
        SamplingParams(temperature=0.5, sampler=max)


def test_a_single_stop_string_is_not_taken_for_its_letters():
    assert SamplingParams(stop="end").stop == ("end",)


def test_stop_strings_and_tokens_may_come_in_any_collection():
    params = SamplingParams(stop=["\n\n", "end"], stop_token_ids=[3, 3, 5])
    assert SamplingParams(stop_token_ids=np.array([3, 5])).stop_token_ids == frozenset({3, 5})
    assert params.stop == ("\n\n", "end")
    assert params.stop_token_ids == frozenset({3, 5})


def test_processors_and_special_tokens_may_come_in_any_collection():
    params = SamplingParams(logits_processors=[max, min], xtc_special_tokens=[3, 3, 5])
    assert params.logits_processors == (max, min)
    assert params.xtc_special_tokens == frozenset({3, 5})


def test_a_bias_is_a_mapping_or_pairs_and_does_not_change_with_the_callers():
    bias = {7: -1.5, 8: 2}
    params = SamplingParams(logit_bias=bias)
    bias[7] = 100.0
    assert params.logit_bias == ((7, -1.5), (8, 2))
    assert params == SamplingParams(logit_bias=[(7, -1.5), (8, 2)])


def test_params_can_be_copied_compared_and_hashed():
    params = SamplingParams(logit_bias={7: 1.0}, logits_processors=[max], xtc_special_tokens=[1])
    assert replace(params, top_k=0) == params == deepcopy(params)
    assert len({params, replace(params), replace(params, logprobs=2)}) == 2


def test_params_cannot_change_while_a_request_runs():
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 7
