"""The real Metal sources, run by the emulator with eval_gpu's launch plans, against float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, _ext
from tests.metal_emulator import Mode
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.numpy_reference import copy_blocks_numpy, write_kv_numpy
from tests.support.ops.paged_cases import (
    FLOAT32_ERROR,
    MANY_OPTIONS,
    OPTIONS,
    TOLERANCE,
    Case,
    as_numpy,
    hide_blocks,
    latent_case,
    leave_range,
    random_case,
    with_layout,
    worst_error,
)

WAYS = {
    "in order": (Mode.FAST, None),
    "shuffled": (Mode.FAST, 7),
    "race check": (Mode.RACE, 3),
    "undefined behaviour": (Mode.UBSAN, None),
}

PAIRS = {
    "chained": [[0, 1], [1, 2], [-1, 3], [4, 6], [6, 4], [3, -1], [5, 0]],
    "of one source later": [[4, 3], [5, 4]],
    "of one destination": [[0, 3], [1, 3]],
    "apart": [[0, 1], [0, 2], [-1, 3], [0, 6], [5, 4]],
}
"""Copies of blocks in a pool of six, whose order counts unless they are apart."""

METAL_TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat"}


@pytest.fixture
def metal() -> MetalRunner:
    """Threads in a random order, and watched; any finding raises."""
    return MetalRunner(*WAYS["race check"])


@pytest.fixture(params=WAYS)
def any_metal(request) -> MetalRunner:
    """Every way to run a kernel."""
    return MetalRunner(*WAYS[request.param])


def run(metal: MetalRunner, case: Case, **overrides: Any) -> Any:
    """The op's result, after asserting that the kernel for these types and widths gave it.

    Queries of another dtype than the pool's are converted to float32.
    """
    q, k_cache, v_cache, tables, lens = case.arrays
    arguments = case.options | overrides
    result = metal.paged_attention(q, [k_cache], [v_cache], tables, lens, **arguments)
    q_dtype = q.dtype if q.dtype == k_cache.dtype else mx.float32
    if "rope_freqs" in arguments:
        q_dtype = mx.float32  # rotated queries are not rounded
    types = f"{METAL_TYPES[k_cache.dtype]}_{METAL_TYPES[q_dtype]}"
    name = f"{types}_d{q.shape[3]}_v{v_cache.shape[3]}_r"
    kernels = f"paged_attention_{name}", f"matrix_attention_{name}"
    assert metal.trace.kernels[0].startswith(kernels)
    return result


def assert_matches_float64(metal: MetalRunner, case: Case) -> None:
    out = run(metal, case)
    want, _ = case.expected()
    assert out.dtype == case.q.dtype
    assert worst_error(out, want) < TOLERANCE[out.dtype]


class TestAttention:
    @pytest.mark.heavy
    @pytest.mark.sampled(12)
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("block_size", [3, 8, 16, 32], ids="S{}".format)
    def test_block_sizes(self, metal, dtype, block_size):
        contexts = sorted({1, block_size - 1, block_size, block_size + 1, 45})
        assert_matches_float64(metal, random_case(contexts, block_size=block_size, dtype=dtype))

    @pytest.mark.slow
    @pytest.mark.parametrize("head_dim", [12, 32, 64, 80, 96, 128, 256], ids="D{}".format)
    def test_head_dims(self, metal, head_dim):
        assert_matches_float64(metal, random_case([45, 7], head_dim=head_dim, dtype=mx.float16))

    @pytest.mark.slow
    @pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 128), (192, 128), (40, 64)])
    def test_values_of_another_width(self, metal, head_dim, v_head_dim):
        assert_matches_float64(metal, random_case([45], head_dim=head_dim, v_head_dim=v_head_dim))

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize(
        ("rank", "rope", "num_heads"), [(512, 64, 1), (512, 64, 3), (256, 64, 3), (16, 8, 7)]
    )
    def test_values_that_are_columns_of_the_keys(self, metal, dtype, rank, rope, num_heads):
        case = latent_case([45, 0, 16], rank, rope, num_heads=num_heads, dtype=dtype)
        assert_matches_float64(metal, case)

    @pytest.mark.slow
    def test_values_apart_from_wide_keys(self, metal):
        case = random_case([45, 7], num_heads=6, head_dim=320, v_head_dim=516)
        assert_matches_float64(metal, case)

    @pytest.mark.slow
    def test_wide_values_of_narrow_keys(self, metal):
        assert_matches_float64(metal, random_case([45], head_dim=64, v_head_dim=320))

    @pytest.mark.slow
    @pytest.mark.parametrize("option", ["sinks", "window_750", "float_mask"])
    def test_latents_of_split_contexts(self, any_metal, option):
        case = latent_case([4097, 0], 512, 64, num_heads=3, options=[option])
        assert_matches_float64(any_metal, case)
        assert any_metal.trace.kernels[1:] == ["merge_splits_float_v512"]

    @pytest.mark.heavy
    def test_weights_over_latents(self, metal):
        case = latent_case([45, 1], 512, 64, num_heads=3, num_tokens=2, spare_columns=0)
        out, attn = run(metal, case, return_attn=True)
        want, want_attn = case.expected()
        assert worst_error(out, want) < FLOAT32_ERROR
        assert worst_error(attn, want_attn) < FLOAT32_ERROR

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "rows"),
        [(2, 2, 1), (8, 2, 4), (7, 1, 4), (8, 1, 4), (3, 1, 4)],
    )
    def test_grouped_heads_share_a_threadgroup(self, metal, num_heads, num_kv_heads, rows):
        case = random_case([45, 16], num_heads=num_heads, num_kv_heads=num_kv_heads)
        assert_matches_float64(metal, case)
        assert metal.trace.kernels == [f"paged_attention_float_float_d64_v64_r{rows}_s8"]

    @pytest.mark.heavy
    @pytest.mark.parametrize("num_tokens", [2, 5], ids="L{}".format)
    def test_several_rows_of_a_sequence_are_causal_by_position(self, metal, num_tokens):
        assert_matches_float64(metal, random_case([45, 16, 3], num_tokens=num_tokens, num_heads=6))

    def test_a_whole_tile_has_keys_that_only_the_first_row_sees(self, metal):
        """The rows' windows begin at the keys 32, 33 and 34."""
        case = random_case([98], num_tokens=3)
        case.options["window"] = 64
        assert_matches_float64(metal, case)

    @pytest.mark.sampled(15)
    @pytest.mark.parametrize("option", OPTIONS)
    def test_every_option(self, metal, option):
        case = random_case([1, 45, 0, 17], num_tokens=2, head_dim=32, options=[option])
        assert_matches_float64(metal, case)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    def test_all_options_together(self, any_metal, dtype):
        case = random_case(
            [45, 5],
            num_tokens=3,
            num_heads=6,
            num_kv_heads=4,
            dtype=dtype,
            options=MANY_OPTIONS,
        )
        assert_matches_float64(any_metal, case)

    @pytest.mark.slow
    @pytest.mark.parametrize("q_dtype", TOLERANCE, ids=str)
    def test_queries_of_another_dtype(self, metal, q_dtype):
        assert_matches_float64(metal, random_case([45], dtype=mx.bfloat16, q_dtype=q_dtype))

    @pytest.mark.parametrize("layout", ["HNSD", "NHSD", "NSHD"])
    def test_any_layout_of_the_pool(self, metal, layout):
        assert_matches_float64(metal, random_case([45, 3], layout=layout))

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "options"),
        [(4, 2, ["sinks", "window_21"]), (7, 1, [])],
        ids=["full tiles", "partial tile"],
    )
    def test_weights_for_debugging(self, metal, num_heads, num_kv_heads, options):
        """The last pass over 45 keys is half empty; one query sees no key at all. The windows in 98
        keys begin in a later tile than the first."""
        case = random_case(
            [45, 1, 5, 98],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_tokens=2,
            block_size=3,
            options=options,
            spare_columns=0,
        )
        out, attn = run(metal, case, return_attn=True)
        want, want_attn = case.expected()
        assert worst_error(out, want) < FLOAT32_ERROR
        assert worst_error(attn, want_attn) < FLOAT32_ERROR

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("group", [1, 4, 7, 8], ids="G{}".format)
    @pytest.mark.parametrize("contexts", [[4097], [1, 15, 4097, 16, 17]], ids=["one", "several"])
    def test_contexts_of_4097_tokens_are_split_and_merged(self, any_metal, dtype, group, contexts):
        case = random_case(contexts, num_heads=group, num_kv_heads=1, dtype=dtype)
        assert_matches_float64(any_metal, case)
        assert any_metal.trace.kernels[1:] == [f"merge_splits_{METAL_TYPES[dtype]}_v64"]

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    def test_a_long_context_is_split_beside_many_short_ones(self, any_metal, dtype):
        case = random_case([1, 0, 2000] + [3] * 13, num_heads=4, num_kv_heads=1, dtype=dtype)
        assert_matches_float64(any_metal, case)
        assert len(any_metal.trace.kernels) == 2

    @pytest.mark.sampled(6)
    @pytest.mark.parametrize("options", [[], ["window_750"], ["sinks"]], ids=str)
    @pytest.mark.parametrize("num_tokens", [1, 3], ids="L{}".format)
    def test_splits_without_keys_store_nothing_and_are_not_read(self, metal, options, num_tokens):
        """The scratch memory of the emulator is NaN."""
        contexts = [511, 512, 513, 1024, 1025, 1035, 2, 0]
        case = random_case(contexts, num_tokens=num_tokens, options=options)
        assert_matches_float64(metal, case)
        assert len(metal.trace.kernels) == 2

    def test_splits_of_rows_that_see_beyond_their_position(self, metal):
        case = random_case([513, 1025, 3], num_tokens=2)
        case.options["causal"] = False
        assert_matches_float64(metal, case)
        assert len(metal.trace.kernels) == 2

    def test_heads_mapped_outside_the_pool_see_nothing_of_split_contexts(self, metal):
        case = random_case([1030, 3])
        case.options["kv_head_mapping"] = mx.array([-2, 0, 1, 2**31 - 2]) + 1
        assert_matches_float64(metal, case)
        assert len(metal.trace.kernels) == 2

    @pytest.mark.parametrize(("window", "splits"), [(1, 1), (512, 1), (513, 3), (1024, 5)])
    def test_a_window_has_splits_for_the_keys_that_it_leaves(self, window, splits):
        """Which begin up to 31 keys before the first of them."""
        for num_blocks in (65, 2000):
            case = random_case([1], options=["sinks"], spare_columns=num_blocks - 1)
            call = _ext.metal.plan_attention(*case.arrays, scale=1.0, window=window)
            assert call["launches"][0]["grid"][2] == splits

    @pytest.mark.slow
    @pytest.mark.parametrize("option", ["sinks", "window_750", "float_mask"])
    def test_options_of_split_contexts(self, any_metal, option):
        case = random_case([4097, 0], num_heads=2, num_kv_heads=1, options=[option])
        assert_matches_float64(any_metal, case)
        assert len(any_metal.trace.kernels) == 2

    def test_a_full_table_is_read_to_its_end_and_no_further(self, metal):
        assert_matches_float64(metal, random_case([7, 45], block_size=3, spare_columns=0))

    def test_blocks_outside_the_pool_hide_their_keys(self, metal):
        case = random_case([45, 45], block_size=8, options=["sinks"])
        hide_blocks(case)
        assert_matches_float64(metal, case)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("head_dim", "block_size"), [(64, 16), (64, 4), (128, 24), (128, 5), (256, 8)]
    )
    def test_blocks_hidden_within_whole_tiles(self, metal, head_dim, block_size):
        """Whose keys are found by the first of a run, or by one of another block."""
        case = random_case([200, 97], block_size=block_size, head_dim=head_dim, dtype=mx.float16)
        tables = np.array(case.block_tables)
        tables[:, 1::3] = -1
        case.block_tables = mx.array(tables)
        assert_matches_float64(metal, case)

    def test_heads_mapped_outside_the_pool_see_nothing(self, metal):
        case = random_case([45])
        mapping = mx.array([-2, 0, 1, 2**31 - 2]) + 1  # checked only where it is evaluated
        case.options["kv_head_mapping"] = mapping
        assert_matches_float64(metal, case)

    @pytest.mark.parametrize("option", ["window_21", "bool_mask", "float_mask"])
    def test_keys_that_no_query_sees_may_hold_anything(self, metal, option):
        case = random_case([45, 45], num_heads=2, num_kv_heads=1, options=[option])
        _, weights = case.expected()
        sequences, positions = np.nonzero((weights[..., :45] == 0).all(axis=(1, 2)))
        assert len(positions) > 10
        blocks = mx.array(np.array(case.block_tables)[sequences, positions // case.block_size])
        offsets = mx.array(positions % case.block_size)
        case.k_cache[:, blocks, offsets] = mx.nan
        case.v_cache[:, blocks, offsets] = mx.nan
        assert_matches_float64(metal, case)

    def test_data_out_of_range_reads_nothing(self, metal):
        case = random_case([45, 20])
        leave_range(case)
        assert not run(metal, case).any()


class TestPool:
    @pytest.mark.sampled(18)
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("v_head_dim", [64, 32, 96], ids="Dv{}".format)
    @pytest.mark.parametrize("given", ["rows", "tokens", "sequence"])
    def test_rows_go_to_their_slots_and_nothing_else_changes(
        self, any_metal, dtype, v_head_dim, given
    ):
        rng = np.random.default_rng(0)
        k = mx.array(rng.standard_normal((9, 2, 64))).astype(dtype)
        v = mx.array(rng.standard_normal((2, 9, v_head_dim))).astype(dtype).transpose(1, 0, 2)
        k_cache, v_cache = (
            with_layout(mx.array(rng.standard_normal((2, 5, 4, dim))).astype(dtype), "NHSD")
            for dim in (64, v_head_dim)
        )
        slots = np.array([3, -1, 19, 7, 20, 2**31 - 1, 0, 4, -(2**31)], np.int32)
        want_k, want_v = as_numpy(k_cache), as_numpy(v_cache)
        write_kv_numpy(as_numpy(k), as_numpy(v), want_k, want_v, slots)
        if given == "tokens":
            k, v = k[:, :, None], v[:, :, None]
        elif given == "sequence":
            k, v = k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None]
        any_metal.write_kv(k, v, k_cache, v_cache, mx.array(slots))
        np.testing.assert_array_equal(as_numpy(k_cache), want_k)
        np.testing.assert_array_equal(as_numpy(v_cache), want_v)
        assert any_metal.trace.kernels[0].startswith("write_kv_")

    @pytest.mark.sampled(6)
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("v_head_dim", [32, 96], ids="Dv{}".format)
    @pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
    def test_blocks_are_copied_in_order(self, metal, dtype, v_head_dim, pairs):
        """By threads of each pair where no order counts."""
        rng = np.random.default_rng(0)
        k_cache, v_cache = (
            with_layout(mx.array(rng.standard_normal((2, 6, 3, dim))).astype(dtype), "NHSD")
            for dim in (64, v_head_dim)
        )
        want_k, want_v = as_numpy(k_cache), as_numpy(v_cache)
        copy_blocks_numpy(want_k, want_v, pairs)
        metal.copy_blocks(k_cache, v_cache, mx.array(pairs, mx.int32))
        np.testing.assert_array_equal(as_numpy(k_cache), want_k)
        np.testing.assert_array_equal(as_numpy(v_cache), want_v)
        assert metal.trace.kernels[0].startswith("copy_blocks_")
        depth = len(pairs) if pairs is PAIRS["apart"] else 1
        assert metal.trace.stats[0].threadgroups == 3 * depth


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_an_engine_runs_on_the_metal_kernels(model_type, monkeypatch):
    """Greedy tokens of a tiny model whose every paged op runs in the emulator are mlx-lm's own."""
    model = tiny_model(model_type, num_hidden_layers=2)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (5, 19, 12)]
    expected = [solo_greedy(model, prompt, 6) for prompt in prompts]
    metal = MetalRunner()
    metal.install(monkeypatch)
    engine = Engine(model, block_size=4, num_blocks=32, prefill_chunk=8)
    done = engine.generate(prompts, max_tokens=6)
    assert [completion.tokens for completion in done] == expected
    kernels = {name.split("_float")[0] for name in metal.trace.kernels}
    assert kernels == {"paged_attention", "write_kv"}
