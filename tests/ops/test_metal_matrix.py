"""The Metal kernel for many query rows, run by the emulator with eval_gpu's plans: it is right."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_metal_nonfinite import SPOILS, assert_same, slot_of

from mlx_paged import _ext
from tests.metal_emulator import Mode
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.paged_cases import (
    TOLERANCE,
    Case,
    as_numpy,
    hide_blocks,
    latent_case,
    leave_range,
    random_case,
    worst_error,
)
from tests.support.ops.ragged_cases import LENGTHS, Ragged, ragged_case

WAYS = {
    "shuffled": (Mode.FAST, 7),
    "race check": (Mode.RACE, 3),
    "undefined behaviour": (Mode.UBSAN, None),
}
BOTH = [mx.float16, mx.bfloat16]
OPTIONS = ["non_causal", "window_1", "window_21", "non_causal_window", "sinks", "softcap"]
MOST_MEMORY = 32 << 10
WEIGHTLESS = 18
TAIL = {
    10: {0: np.inf, 3: -np.inf},
    13: {0: -np.inf, -1: np.inf, 17: np.nan},
    15: {3: np.nan, 16: -np.inf},
    WEIGHTLESS: {1: np.inf, -2: -np.inf},
    23: {-3: np.inf},
}
"""By position: columns of a value, and what is there."""


@pytest.fixture(params=WAYS)
def any_metal(request) -> MetalRunner:
    return MetalRunner(*WAYS[request.param])


@pytest.fixture
def metal() -> MetalRunner:
    """Threads in a random order, and watched; any finding raises."""
    return MetalRunner(Mode.RACE, 3)


def run(metal: MetalRunner, case: Case | Ragged, **overrides: Any) -> mx.array:
    if isinstance(case, Ragged):
        pool = [case.pool[0]], [case.pool[1]]
        arrays = case.q, *pool, case.tables, case.lens, case.cu_seqlens
        return metal.paged_attention_varlen(*arrays, **case.options, **overrides)
    arrays = case.q, [case.k_cache], [case.v_cache], case.block_tables, case.context_lens
    return metal.paged_attention(*arrays, **case.options, **overrides)


def assert_matches_float64(metal: MetalRunner, case: Case | Ragged, **overrides: Any) -> None:
    out = run(metal, case, **overrides)
    want = case.expected() if isinstance(case, Ragged) else case.expected()[0]
    assert worst_error(out, want) < TOLERANCE[out.dtype]
    assert metal.trace.kernels[0].startswith("matrix_attention_")
    assert metal.trace.stats[0].threadgroup_bytes <= MOST_MEMORY


def by_matrices(contexts: list[int], num_tokens: int = 9, **sizes: Any) -> Case:
    """Three heads share a KV head."""
    sizes = {"num_heads": 6, "head_dim": 32, "dtype": mx.float16} | sizes
    return random_case(contexts, num_tokens=num_tokens, **sizes)


class TestOneLength:
    @pytest.mark.slow
    def test_simdgroups_may_have_unequal_parts_of_the_dimensions(self, metal):
        """Two have 9 and 8 of 17 matrices."""
        assert_matches_float64(metal, by_matrices([40], num_tokens=2, head_dim=136))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "dims",
        [8, 16, 32, 64, 80, 96, 112, 128, 192, 256, (192, 128), (64, 96), (320, 256), (64, 512)],
        ids=str,
    )
    def test_head_dims(self, metal, dims):
        head_dim, v_head_dim = dims if isinstance(dims, tuple) else (dims, dims)
        case = by_matrices([45, 10], head_dim=head_dim, v_head_dim=v_head_dim)
        assert_matches_float64(metal, case)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", BOTH, ids=str)
    @pytest.mark.parametrize(
        ("group", "num_tokens", "rows"),
        [(4, 2, 8), (3, 2, 8), (9, 1, 16), (1, 16, 32), (4, 5, 32), (7, 10, 32)],
    )
    def test_rows_of_a_threadgroup(self, any_metal, dtype, group, num_tokens, rows):
        case = by_matrices(
            [45, 1, 70], num_tokens, num_heads=2 * group, head_dim=64, dtype=dtype, block_size=3
        )
        assert_matches_float64(any_metal, case)
        assert any_metal.trace.kernels[0].endswith(f"_r{rows}")

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", BOTH, ids=str)
    @pytest.mark.parametrize(
        ("rank", "rope", "num_tokens"), [(512, 64, 1), (256, 64, 2), (64, 16, 5)]
    )
    def test_values_that_are_columns_of_the_keys(self, any_metal, dtype, rank, rope, num_tokens):
        case = latent_case(
            [45, 0, 16], rank, rope, num_heads=16, num_tokens=num_tokens, dtype=dtype
        )
        assert_matches_float64(any_metal, case)

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("num_tokens", [3, 9])
    @pytest.mark.parametrize("option", OPTIONS)
    def test_options(self, metal, option, num_tokens):
        assert_matches_float64(metal, by_matrices([1, 45, 0, 17], num_tokens, options=[option]))

    @pytest.mark.heavy
    @pytest.mark.sampled(20)
    @pytest.mark.parametrize("contexts", [[1300], [600, 3, 1100]], ids=["one", "several"])
    @pytest.mark.parametrize("options", [(), ("sinks",), ("window_750",), ("non_causal",)], ids=str)
    def test_split_contexts(self, any_metal, contexts, options):
        assert_matches_float64(any_metal, by_matrices(contexts, 5, options=options))
        assert any_metal.trace.kernels[1:] == ["merge_splits_half_v32"]

    @pytest.mark.parametrize(("num_tokens", "splits"), [(64, 2), (256, 2), (512, 1)])
    def test_many_threadgroups_are_not_split(self, num_tokens, splits):
        """64 heads have 64 * num_tokens / 32 threadgroups, and 1024 are enough."""
        case = by_matrices([600], 1, num_heads=64, num_kv_heads=64, head_dim=8)
        q = mx.zeros((1, 64, num_tokens, 8), case.q.dtype)
        call = _ext.metal.plan_attention(q, *case.arrays[1:], scale=1.0)
        assert call["launches"][0]["grid"] == (64 * num_tokens // 32, 1, splits)

    @pytest.mark.parametrize("layout", ["HNSD", "NHSD", "NSHD"])
    def test_any_layout_of_the_pool(self, metal, layout):
        assert_matches_float64(metal, by_matrices([45, 3], layout=layout))

    def test_queries_that_begin_within_a_vector(self, metal):
        case = by_matrices([45, 3])
        memory = mx.pad(case.q.reshape(-1), (1, 0))
        mx.eval(memory)
        case.q = memory[1:].reshape(case.q.shape)
        assert_matches_float64(metal, case)

    def test_blocks_outside_the_pool_hide_their_keys(self, metal):
        case = by_matrices([45, 45], block_size=8, options=["sinks"])
        hide_blocks(case)
        assert_matches_float64(metal, case)

    def test_data_out_of_range_reads_nothing(self, metal):
        case = by_matrices([45, 20])
        leave_range(case)
        assert not run(metal, case).any()


class TestDifferentLengths:
    @pytest.mark.sampled(18)
    @pytest.mark.parametrize("num_decodes", [0, 1])
    @pytest.mark.parametrize("lengths", [LENGTHS["mixed"], [1, 2, 20], [1, 9]], ids=str)
    @pytest.mark.parametrize("heads", [(4, 2), (7, 1), (40, 1)], ids=str)
    def test_sequences(self, metal, lengths, num_decodes, heads):
        case = ragged_case(
            lengths, num_heads=heads[0], num_kv_heads=heads[1], head_dim=32, dtype=mx.float16
        )
        assert_matches_float64(metal, case, num_decodes=num_decodes)

    @pytest.mark.sampled(6)
    @pytest.mark.parametrize("lengths", [LENGTHS["empty_first"], LENGTHS["all_new"]], ids=str)
    def test_chunks_alone(self, any_metal, lengths):
        assert_matches_float64(any_metal, ragged_case(lengths, head_dim=32, dtype=mx.bfloat16))

    def test_decodes_alone_are_a_call_of_one_token_each(self, metal):
        case = ragged_case([1, 1, 1], num_heads=32, num_kv_heads=2, dtype=mx.float16)
        assert_matches_float64(metal, case, num_decodes=3)
        assert metal.trace.kernels == ["matrix_attention_half_half_d64_v64_r16"]

    @pytest.mark.slow
    @pytest.mark.parametrize("num_decodes", [0, 1])
    @pytest.mark.parametrize("options", [(), ("sinks", "window_750"), ("sinks",)], ids=str)
    def test_split_contexts(self, any_metal, options, num_decodes):
        """One merge for decodes and chunks."""
        case = ragged_case(
            [1, 3, 0, 20], befores=(1300, 600, 0, 3), options=options, dtype=mx.float16
        )
        assert_matches_float64(any_metal, case, num_decodes=num_decodes)
        names = [name.split("_half")[0] for name in any_metal.trace.kernels]
        decodes = ["paged_attention"] if num_decodes else []
        assert names == ["matrix_attention", *decodes, "merge_splits"]

    @pytest.mark.slow
    def test_if_chunks_fill_a_gpu_only_decodes_are_split(self):
        metal = MetalRunner(Mode.FAST, 3)
        case = ragged_case(
            [1, 256],
            befores=(1300, 3),
            num_heads=64,
            num_kv_heads=64,
            head_dim=8,
            block_size=64,
            dtype=mx.float16,
        )
        assert_matches_float64(metal, case, num_decodes=1)
        matrix, decodes, merge = metal.trace.stats
        assert matrix.threadgroups == 64 * (257 // 32 + 1 + 1)
        assert decodes.threadgroups == 64 * 3
        assert merge.threadgroups == 64

    @pytest.mark.slow
    def test_chunks_of_many_threadgroups_are_split_less_than_the_decodes_beside_them(self):
        """Into as few splits as 1,024 threadgroups allow: fewer than room is stored for."""
        metal = MetalRunner(Mode.FAST, 3)
        case = ragged_case(
            [1, 33],
            befores=(9000, 600),
            num_heads=128,
            num_kv_heads=128,
            head_dim=8,
            block_size=64,
            dtype=mx.float16,
        )
        assert_matches_float64(metal, case, num_decodes=1)
        matrix, decodes, _ = metal.trace.stats
        tiles = 128 * (34 // 32 + 1)
        assert matrix.threadgroups == (tiles + 128) * (1024 // tiles)
        assert decodes.threadgroups == 128 * 5

    @pytest.mark.slow
    @pytest.mark.parametrize("length", [5, 12])
    @pytest.mark.parametrize("heads", [(8, 2), (4, 1), (28, 4)], ids=str)
    def test_all_launches_store_as_many_splits_as_there_is_room_for(self, heads, length):
        """Few long chunks have more threadgroups' splits than the decodes beside them."""
        for keys in (9_000, 17_000, 33_280, 40_960):
            lengths, befores = [1, length], (8, keys - length)
            sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 64}
            case = ragged_case(lengths, befores=befores, block_size=64, dtype=mx.float16, **sizes)
            arrays = case.q[:, :, None], *case.pool, case.tables, case.lens
            options = {"cu_seqlens": case.cu_seqlens, "num_decodes": 1}
            call = _ext.metal.plan_attention(*arrays, scale=1.0, **options)
            *attends, _ = call["launches"]
            partial_bytes = call["scratch_bytes"][0]
            rows = case.q.shape[0] * heads[0]
            room = partial_bytes // (rows * 64 * 4)
            assert all(launch["grid"][2] <= room for launch in attends)

    @pytest.mark.sampled(2)
    def test_a_chunk_of_more_splits_than_the_decode_beside_it(self, metal):
        sizes = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 8, "block_size": 64}
        case = ragged_case([1, 5], befores=(600, 34_000), dtype=mx.float16, **sizes)
        assert_matches_float64(metal, case, num_decodes=1)

    @pytest.mark.slow
    @pytest.mark.parametrize("before", [3, 700], ids=["whole", "split"])
    @pytest.mark.parametrize("begins", [[0, 1, 4], [0, 0, 43]], ids=str)
    def test_rows_after_the_last_sequence_are_zeros(self, metal, begins, before):
        case = ragged_case([1, 43], befores=(before, before), dtype=mx.float16)
        case.cu_seqlens = mx.array(begins)
        out = run(metal, case)
        assert worst_error(out[: begins[-1]], case.expected()) < TOLERANCE[mx.float16]
        assert not out[begins[-1] :].any()

    @pytest.mark.slow
    def test_latents(self, metal):
        case = ragged_case([1, 1, 5], latent=(512, 64), num_heads=16, dtype=mx.float16)
        assert_matches_float64(metal, case, num_decodes=2)

    @pytest.mark.slow
    @pytest.mark.parametrize("befores", [(40, 3), (700, 3)], ids=["whole", "split"])
    @pytest.mark.parametrize(
        "begins", [[0, 1, 99], [-5, 1, 6], [0, 9, -3], [2**31 - 1, -(2**31), 6]], ids=str
    )
    def test_wrong_lengths_read_nothing_outside(self, metal, begins, befores):
        case = ragged_case([1, 5], befores=befores, dtype=mx.float16)
        case.cu_seqlens = mx.array(begins)
        assert run(metal, case).shape == case.q.shape

    def test_what_the_kernel_does_not_compute_is_refused(self):
        case = ragged_case([1, 5])
        arrays = case.q[:, :, None], *case.pool, case.tables, case.lens
        with pytest.raises(RuntimeError, match=r"k_cache has dtype float32 .* expected float16"):
            _ext.metal.plan_attention(*arrays, cu_seqlens=case.cu_seqlens, scale=1.0)


class TestNonfinite:
    @pytest.mark.heavy
    @pytest.mark.sampled(11)
    @pytest.mark.parametrize("dtype", BOTH, ids=str)
    @pytest.mark.parametrize("option", [(), ("window_21",)], ids=str)
    @pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
    def test_it_shows_in_the_rows_that_read_it(self, metal, spoil, option, dtype):
        """Of the queries only the last one sees the last key."""
        case = by_matrices([64, 5, 0], 3, options=option, dtype=dtype, head_dim=40)
        spoil(case)
        with np.errstate(all="ignore"):
            want = case.expected()[0]
        assert_same(run(metal, case), want, 2 * TOLERANCE[dtype])

    @pytest.mark.sampled(30)
    @pytest.mark.parametrize("dtype", BOTH, ids=str)
    @pytest.mark.parametrize("before", [0, 600], ids=["whole", "split"])
    @pytest.mark.parametrize("dims", [40, 64, 128, 256, (24, 72)], ids=str)
    def test_values_that_some_rows_of_a_tile_see(self, any_metal, dims, before, dtype):
        """Where the first and the last columns meet infinities of both signs, their sum, NaN and an
        infinity of no weight; in the other columns nothing shows."""
        head_dim, v_head_dim = dims if isinstance(dims, tuple) else (dims, dims)
        sizes = {"head_dim": head_dim, "v_head_dim": v_head_dim, "dtype": dtype}
        case = by_matrices([before + 24], 17, **sizes)
        for position, spoils in TAIL.items():
            block, slot = slot_of(case, 0, before + position)
            for column, value in spoils.items():
                case.v_cache[:, block, slot, column] = value
        block, slot = slot_of(case, 0, before + WEIGHTLESS)
        case.k_cache[:, block, slot, 5] = -mx.inf
        case.q[..., 5] = mx.abs(case.q[..., 5])
        with np.errstate(all="ignore"):
            want = case.expected()[0]
        assert {*np.isfinite(want).all(axis=(0, 1, 2))} == {True, False}
        assert_same(run(any_metal, case), want, 2 * TOLERANCE[dtype])

    @pytest.mark.heavy
    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_latents_that_some_rows_of_a_tile_see(self, any_metal, value):
        """A latent is a key and a value."""
        case = latent_case([40, 3], 64, 16, num_heads=4, num_tokens=9, dtype=mx.float16)
        block, slot = slot_of(case, 0, 36)
        case.k_cache[0, block, slot, 21] = value
        case.v_cache = case.k_cache[..., :64]
        with np.errstate(all="ignore"):
            want = case.expected()[0]
        assert np.isfinite(want[0, :, :5]).all() and np.isnan(want[0, :, 5:, 21]).all()
        assert_same(run(any_metal, case), want, 2 * TOLERANCE[mx.float16])

    def test_a_value_that_has_left_the_window_of_later_rows_does_not_reach_them(self, metal):
        """It is in a block of keys of which every row sees those at the end."""
        case = by_matrices([64], 3)
        case.options["window"] = 50
        block, slot = divmod(64 - 3 - 50 + 1, case.block_size)
        case.v_cache[:, case.block_tables[0, block], slot] = mx.nan
        out, want = run(metal, case), case.expected()[0]
        assert np.isnan(want[:, :, 0]).all() and np.isfinite(want[:, :, 1:]).all()
        assert_same(out, want, 2 * TOLERANCE[mx.float16])

    def test_sinks_that_are_not_finite(self):
        case = by_matrices([45, 3], 3, num_heads=4, num_kv_heads=1)
        case.options["sinks"] = mx.array([np.nan, -np.inf, 1e30, -1e38])
        with np.errstate(all="ignore"):
            want = case.expected()[0]
        assert_same(run(MetalRunner(Mode.FAST, 3), case), want, 2 * TOLERANCE[mx.float16])

    def test_keys_that_no_query_sees_may_hold_anything(self, metal):
        case = by_matrices([45, 45], 3, options=["window_21"])
        _, weights = case.expected()
        sequences, positions = np.nonzero((weights[..., :45] == 0).all(axis=(1, 2)))
        assert len(positions) > 10
        blocks = mx.array(np.array(case.block_tables)[sequences, positions // case.block_size])
        offsets = mx.array(positions % case.block_size)
        case.k_cache[:, blocks, offsets] = mx.nan
        case.v_cache[:, blocks, offsets] = mx.nan
        assert_matches_float64(metal, case)


def test_results_do_not_depend_on_the_batch():
    """As long as a call has as many splits."""
    case = by_matrices([45, 70], 3)
    together = run(MetalRunner(), case)
    case.q, case.block_tables = case.q[1:], case.block_tables[1:]
    case.context_lens = case.context_lens[1:]
    assert np.array_equal(as_numpy(together[1:]), as_numpy(run(MetalRunner(), case)))
