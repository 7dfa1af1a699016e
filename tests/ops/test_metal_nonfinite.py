"""NaN, infinities and the lowest masks in the Metal kernels: as in float64 and in the CPU op.

What no query sees is NaN in every case, so that a leak of it would show.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.metal_emulator import Mode
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.paged_cases import (
    FLOAT32_ERROR,
    TOLERANCE,
    Case,
    as_numpy,
    attend,
    random_case,
)

SPLIT = 1030
CONTEXTS = {"whole": [45, 3, 0], "split": [SPLIT, 300]}
LOWEST = {"float32": -3.4028234663852886e38, "bfloat16": -3.3895313892515355e38}
"""What models take for -inf in masks: `finfo.min` of two dtypes."""


@pytest.fixture
def metal() -> MetalRunner:
    """Threads in a random order."""
    return MetalRunner(Mode.FAST, 3)


def slot_of(case: Case, sequence: int, position: int) -> tuple[int, int]:
    block = case.block_tables[sequence, position // case.block_size].item()
    return int(block), position % case.block_size


def spoil_query(value: float) -> Callable[[Case], None]:
    """One element of one head of the first sequence."""

    def spoil(case: Case) -> None:
        case.q[0, 1, 0, 5] = value

    return spoil


def spoil_row(name: str, value: float, position: int = 2) -> Callable[[Case], None]:
    """One element of a key or value of the first sequence; negative positions are from its end."""

    def spoil(case: Case) -> None:
        block, offset = slot_of(case, 0, position % case.context_lens[0].item())
        getattr(case, name)[0, block, offset, 7] = value

    return spoil


def spoil_row_without_weight(case: Case) -> None:
    """A score of -inf where the query has a positive element; and 0 * inf is NaN."""
    spoil_row("k_cache", -np.inf)(case)
    spoil_row("v_cache", np.inf)(case)


SPOILS: dict[str, Callable[[Case], None]] = {
    "NaN in q": spoil_query(np.nan),
    "NaN in K": spoil_row("k_cache", np.nan),
    "NaN in the last key": spoil_row("k_cache", np.nan, -1),
    "inf in K": spoil_row("k_cache", np.inf),
    "-inf in K": spoil_row("k_cache", -np.inf),
    "inf in the last key": spoil_row("k_cache", np.inf, -1),
    "key of no weight and inf in V": spoil_row_without_weight,
    "inf in V": spoil_row("v_cache", np.inf),
    "-inf in the last value": spoil_row("v_cache", -np.inf, -1),
    "NaN in V": spoil_row("v_cache", np.nan),
    "NaN in the last value": spoil_row("v_cache", np.nan, -1),
}


def assert_same(got: mx.array, want: np.ndarray, tolerance: float) -> None:
    """NaN and infinities in the same places, and the same numbers elsewhere."""
    actual = as_numpy(got)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(actual[~finite], want[~finite])
    worst = np.abs(actual[finite] - want[finite]).max(initial=0)
    assert worst <= tolerance * np.abs(want[finite]).max(initial=1)


def run(metal: MetalRunner, case: Case, **options: Any) -> tuple[mx.array, ...]:
    q, k_cache, v_cache, tables, lens = case.arrays
    arguments = case.options | options
    result = metal.paged_attention(q, [k_cache], [v_cache], tables, lens, **arguments)
    return result if isinstance(result, tuple) else (result,)


def assert_matches(metal: MetalRunner, case: Case, *, as_cpu: bool = False) -> None:
    """The output is that of float64, and so are the output and the weights where both are asked
    for; with `as_cpu` the CPU op's too."""
    with np.errstate(all="ignore"):
        wants = case.expected()
    tolerances = 2 * TOLERANCE[case.q.dtype], FLOAT32_ERROR
    assert_same(run(metal, case)[0], wants[0], tolerances[0])
    results = [run(metal, case, return_attn=True)]
    if as_cpu:
        results.append(attend(case))
    for result in results:
        for got, want, tolerance in zip(result, wants, tolerances, strict=True):
            assert_same(got, want, tolerance)


class TestPoison:
    @pytest.mark.heavy
    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
    @pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
    def test_it_shows_in_the_rows_that_read_it(self, metal, spoil, contexts):
        """Of two queries the first does not see the last key."""
        case = random_case(contexts, num_tokens=2)
        spoil(case)
        assert_matches(metal, case)
        assert ("merge_splits_float_v64" in metal.trace.kernels) == (contexts[0] == SPLIT)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
    @pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
    def test_as_in_the_cpu_op(self, metal, spoil, contexts):
        case = random_case(contexts)
        spoil(case)
        assert_matches(metal, case, as_cpu=True)

    def test_the_cpu_op_too_gives_no_weight_to_keys_that_a_row_does_not_see(self):
        """One row of a tile is NaN, and sees a key fewer than the tile's other row."""
        case = random_case([45], num_tokens=2)
        SPOILS["NaN in K"](case)
        with np.errstate(all="ignore"):
            assert_same(attend(case)[1], case.expected()[1], FLOAT32_ERROR)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
    @pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
    def test_in_other_dtypes(self, metal, spoil, dtype):
        case = random_case([45, 3], num_heads=8, head_dim=128, dtype=dtype)
        spoil(case)
        assert_matches(metal, case)

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("option", ["window_21", "sinks", "bool_mask", "float_mask", "softcap"])
    @pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
    def test_with_options(self, metal, spoil, option):
        """A window and a mask hide some of it, a cap bounds what is infinite."""
        case = random_case([45, 17], num_tokens=2, options=[option])
        spoil(case)
        assert_matches(metal, case)

    @pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
    def test_sinks_that_are_not_finite(self, metal, contexts):
        case = random_case(contexts)
        case.options["sinks"] = mx.array([np.nan, -np.inf, 1e30, -1e38])
        assert_matches(metal, case, as_cpu=True)


def mask_of(case: Case, value: float, seen: int) -> mx.array:
    """`value` for every key but the first `seen` of each sequence, 0 for these."""
    num_keys = case.block_tables.shape[1] * case.block_size
    mask = np.full((len(case.context_lens), 1, 1, num_keys), value, np.float32)
    mask[..., :seen] = 0
    return mx.array(mask)


class TestLowestMasks:
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
    @pytest.mark.parametrize("value", [*LOWEST.values(), -2.5e38, -1e38])
    @pytest.mark.parametrize("seen", [0, 1, 20])
    def test_keys_that_are_all_masked_share_the_weights(self, metal, contexts, value, seen):
        case = random_case(contexts)
        case.options["attn_mask"] = mask_of(case, value, seen)
        if seen == 0:
            weights = as_numpy(run(metal, case, return_attn=True)[1])[0]
            np.testing.assert_allclose(weights[..., : contexts[0]], 1 / contexts[0], rtol=1e-6)
        assert_matches(metal, case, as_cpu=True)

    def test_in_bfloat16(self, metal):
        case = random_case([45], num_tokens=2, dtype=mx.bfloat16)
        case.options["attn_mask"] = mask_of(case, LOWEST["bfloat16"], 0).astype(mx.bfloat16)
        assert_matches(metal, case, as_cpu=True)

    @pytest.mark.parametrize("option", ["sinks", "window_21", "softcap"])
    def test_with_options(self, metal, option):
        case = random_case([45, 3], options=[option])
        case.options["attn_mask"] = mask_of(case, LOWEST["float32"], 0)
        assert_matches(metal, case, as_cpu=True)

    def test_minus_infinity_hides_what_the_lowest_float_does_not(self, metal):
        case = random_case([45])
        mask = np.array(mask_of(case, LOWEST["float32"], 0))
        mask[..., :40] = -np.inf
        case.options["attn_mask"] = mx.array(mask)
        spoil_row("k_cache", np.nan)(case)
        assert_matches(metal, case)
