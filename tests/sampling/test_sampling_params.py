"""Valid and invalid sampling parameters."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from mlx_paged.sampling_params import SamplingParams

INF, NAN = float("inf"), float("nan")

BAD_VALUES = {
    ("max_tokens", "an integer >= 1"): [0, -1, 1.5, True, "9", NAN],
    ("temperature", ">= 0 and finite"): [-0.1, INF, NAN, "1", True, 10**400],
    ("top_p", "from 0 to 1"): [-0.1, 1.1, NAN, "0.9", True, 10**400],
    ("top_k", "an integer >= 0"): [-1, 2.5, False],
    ("min_p", "from 0 to 1"): [-0.1, 1.1, NAN],
    ("seed", "an integer in [0, 2**64)"): [-1, 2**64, 0.5, True],
    ("stop", "non-empty strings"): [("",), ("end", 7)],
    ("stop", "a collection"): [7, b"end"],
    ("stop_token_ids", "a collection"): [7, "7", b"7"],
    ("stop_token_ids", "a collection of token ids"): [[[7]]],
    ("stop_token_ids", "token ids >= 0"): [*map(frozenset, ({"7"}, {7.5}, {True}, {NAN}, {-1}))],
    ("xtc_probability", "from 0 to 1"): [1.1, NAN],
    ("xtc_threshold", "from 0 to 0.5"): [-0.1, 0.6],
    ("xtc_special_tokens", "a collection"): [7, b"7"],
    ("xtc_special_tokens", "token ids >= 0"): [frozenset({-1}), frozenset({"</s>"})],
    ("repetition_penalty", "None, or >= 0 and finite"): [-0.1, INF, "1.1"],
    ("presence_penalty", "None or a finite number"): [INF, "0.5"],
    ("frequency_penalty", "None or a finite number"): [NAN, True],
    ("repetition_context_size", "an integer >= 0"): [-1],
    ("presence_context_size", "an integer >= 0"): [1.5],
    ("frequency_context_size", "an integer >= 0"): [None],
    ("logit_bias", "a collection"): [7, ""],
    ("logit_bias", "numbers below infinity by token id >= 0"): [
        (7,),
        *((pair,) for pair in [(-1, 1.0), ("7", 1.0), (7, INF), (7, NAN), (7, "1"), (7, 1.0, 2.0)]),
        *((pair,) for pair in [(True, 1.0), (7, True)]),
    ],
    ("logits_processors", "a collection"): [max],
    ("logits_processors", "callables"): [("max",)],
    ("sampler", "a callable"): ["greedy"],
    ("ignore_eos", "True or False"): ["no", 1],
    ("logprobs", "an integer >= 0"): [-1, True],
}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [(field, bad, expected) for (field, expected), values in BAD_VALUES.items() for bad in values],
    ids=str,
)
def test_a_value_out_of_range_is_named_with_its_range(field, value, expected):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    assert str(error.value) == f"[SamplingParams] {field} is {value!r:.80}: expected {expected}"


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
