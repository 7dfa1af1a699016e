"""The real Metal sources, run by the emulator with eval_gpu's launch plans, against float64."""

import mlx.core as mx
import numpy as np
import pytest
from metal_emulator import Mode, require_emulator, typecheck
from metal_runner import MetalRunner
from paged_cases import (
    FLOAT32_ERROR,
    MANY_OPTIONS,
    OPTIONS,
    TOLERANCE,
    Case,
    as_numpy,
    random_case,
    with_layout,
    worst_error,
)
from tiny_models import VOCAB, solo_greedy, tiny_model

from mlx_paged import Engine, _ext
from mlx_paged.reference import copy_blocks_numpy, write_kv_numpy

WAYS = {
    "in order": (Mode.FAST, None),
    "shuffled": (Mode.FAST, 7),
    "race check": (Mode.RACE, 3),
    "undefined behaviour": (Mode.UBSAN, None),
}


@pytest.fixture(params=["shuffled", "race check"])
def metal(request) -> MetalRunner:
    """Threads in a random order, and watched; any finding raises."""
    return MetalRunner(*WAYS[request.param])


@pytest.fixture(params=WAYS)
def any_metal(request) -> MetalRunner:
    """Every way to run a kernel."""
    return MetalRunner(*WAYS[request.param])


def assert_matches_float64(metal: MetalRunner, case: Case) -> None:
    q, k_cache, v_cache, tables, lens = case.arrays
    out = metal.paged_attention(q, [k_cache], [v_cache], tables, lens, **case.options)
    want, _ = case.expected()
    assert out.dtype == q.dtype
    assert worst_error(out, want) < TOLERANCE[out.dtype]


class TestAttention:
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("block_size", [3, 8, 16, 32], ids="S{}".format)
    def test_block_sizes(self, metal, dtype, block_size):
        contexts = sorted({1, block_size - 1, block_size, block_size + 1, 45})
        assert_matches_float64(metal, random_case(contexts, block_size=block_size, dtype=dtype))

    @pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256], ids="D{}".format)
    def test_head_dims(self, metal, head_dim):
        assert_matches_float64(metal, random_case([45, 7], head_dim=head_dim, dtype=mx.float16))

    @pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 128), (192, 128), (40, 64)])
    def test_values_of_another_width(self, metal, head_dim, v_head_dim):
        assert_matches_float64(metal, random_case([45], head_dim=head_dim, v_head_dim=v_head_dim))

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "rows"),
        [(2, 2, 1), (8, 2, 4), (7, 1, 4), (8, 1, 4), (3, 1, 2)],
    )
    def test_grouped_heads_share_a_threadgroup(self, metal, num_heads, num_kv_heads, rows):
        case = random_case([45, 16], num_heads=num_heads, num_kv_heads=num_kv_heads)
        assert_matches_float64(metal, case)
        assert metal.trace.kernels == [f"paged_attention_float_float_d64_v64_r{rows}"]

    @pytest.mark.parametrize("num_tokens", [2, 5], ids="L{}".format)
    def test_several_rows_of_a_sequence_are_causal_by_position(self, metal, num_tokens):
        assert_matches_float64(metal, random_case([45, 16, 3], num_tokens=num_tokens, num_heads=6))

    @pytest.mark.parametrize("option", OPTIONS)
    def test_every_option(self, metal, option):
        case = random_case([1, 45, 0, 17], num_tokens=2, head_dim=32, options=[option])
        assert_matches_float64(metal, case)

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

    @pytest.mark.parametrize("q_dtype", TOLERANCE, ids=str)
    def test_queries_of_another_dtype(self, metal, q_dtype):
        assert_matches_float64(metal, random_case([45], dtype=mx.bfloat16, q_dtype=q_dtype))

    @pytest.mark.parametrize("layout", ["HNSD", "NHSD", "NSHD"])
    def test_any_layout_of_the_pool(self, metal, layout):
        assert_matches_float64(metal, random_case([45, 3], layout=layout))

    def test_weights_for_debugging(self, metal):
        case = random_case([45, 5], num_tokens=2, options=["sinks", "window_21"])
        q, k, v, tables, lens = case.arrays
        out, attn = metal.paged_attention(
            q, [k], [v], tables, lens, return_attn=True, **case.options
        )
        want, want_attn = case.expected()
        assert worst_error(out, want) < FLOAT32_ERROR
        assert worst_error(attn, want_attn) < FLOAT32_ERROR

    @pytest.mark.parametrize("option", [None, "sinks", "window_21", "float_mask"])
    def test_long_contexts_are_split_and_merged(self, any_metal, option):
        case = random_case([4097], num_heads=2, num_kv_heads=1, options=[option] if option else [])
        assert_matches_float64(any_metal, case)
        assert [name.split("_float")[0] for name in any_metal.trace.kernels] == [
            "paged_attention",
            "merge_splits",
        ]

    def test_data_out_of_range_reads_nothing(self, metal):
        case = random_case([45, 20])
        case.block_tables = mx.array(np.full(case.block_tables.shape, 2**31 - 1, np.int32))
        case.context_lens = mx.array([2**31 - 1, -5])
        q, k, v, tables, lens = case.arrays
        assert not metal.paged_attention(q, [k], [v], tables, lens).any()


class TestBytes:
    """What the emulator counts, at a context of 4,096 tokens."""

    @pytest.mark.parametrize("batch", [1, 64], ids=["split", "whole"])
    @pytest.mark.parametrize(
        ("group", "head_dim", "times"), [(1, 128, 1), (4, 128, 1), (4, 64, 1), (8, 128, 2)]
    )
    def test_each_byte_is_loaded_once_for_four_heads(self, batch, group, head_dim, times):
        context = 4096 if batch == 1 else 512
        metal = MetalRunner(Mode.RACE)
        case = random_case(
            [context] * batch,
            num_heads=2 * group,
            num_kv_heads=2,
            head_dim=head_dim,
            dtype=mx.float16,
        )
        q, k, v, tables, lens = case.arrays
        metal.paged_attention(q, [k], [v], tables, lens)
        assert len(metal.trace.kernels) == (2 if batch == 1 else 1)
        stats = metal.trace.stats[0]
        live_bytes = batch * context * 2 * head_dim * 2
        assert stats.loaded_bytes[1] == stats.loaded_bytes[2] == times * live_bytes

    def test_a_window_loads_only_its_own_blocks(self):
        metal = MetalRunner(Mode.RACE)
        case = random_case([1000], num_heads=1, num_kv_heads=1)
        q, k, v, tables, lens = case.arrays
        metal.paged_attention(q, [k], [v], tables, lens, window=40)
        assert sum(stats.loaded_bytes.get(1, 0) for stats in metal.trace.stats[:1]) == 40 * 64 * 4


class TestPool:
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("v_head_dim", [64, 32], ids="Dv{}".format)
    def test_rows_go_to_their_slots_and_nothing_else_changes(self, any_metal, dtype, v_head_dim):
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
        any_metal.write_kv(k, v, k_cache, v_cache, mx.array(slots))
        np.testing.assert_array_equal(as_numpy(k_cache), want_k)
        np.testing.assert_array_equal(as_numpy(v_cache), want_v)
        assert any_metal.trace.kernels[0].startswith("write_kv_")

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    def test_blocks_are_copied_in_order(self, metal, dtype):
        rng = np.random.default_rng(0)
        k_cache, v_cache = (
            with_layout(mx.array(rng.standard_normal((2, 6, 3, dim))).astype(dtype), "NHSD")
            for dim in (64, 32)
        )
        pairs = np.array([[0, 1], [1, 2], [-1, 3], [4, 6], [5, 0]], np.int32)
        want_k, want_v = as_numpy(k_cache), as_numpy(v_cache)
        copy_blocks_numpy(want_k, want_v, pairs)
        metal.copy_blocks(k_cache, v_cache, mx.array(pairs))
        np.testing.assert_array_equal(as_numpy(k_cache), want_k)
        np.testing.assert_array_equal(as_numpy(v_cache), want_v)
        assert metal.trace.kernels[0].startswith("copy_blocks_")


class TestPlans:
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    def test_address_spaces_and_types_are_right(self, dtype):
        require_emulator()
        case = random_case([5000], dtype=dtype, options=["sinks"])
        pools = case.k_cache, case.v_cache
        calls = [
            _ext.metal.plan_attention(*case.arrays, scale=1.0, **case.options),
            _ext.metal.plan_copy_blocks(*pools, mx.zeros((1, 2), mx.int32)),
        ]
        for launch in (launch for call in calls for launch in call["launches"]):
            assert typecheck(launch["source"]) == []

    def test_nothing_to_do_launches_nothing(self):
        case = random_case([], num_heads=2)
        plan = _ext.metal.plan_attention(*case.arrays, scale=1.0)
        assert plan["launches"] == []
        pools = case.k_cache, case.v_cache
        assert _ext.metal.plan_copy_blocks(*pools, mx.zeros((0, 2), mx.int32))["launches"] == []

    def test_every_constant_is_in_the_pipelines_name(self):
        names = set()
        for option in (None, *OPTIONS):
            for block_size in (8, 16):
                case = random_case([5], block_size=block_size, options=[option] if option else [])
                plan = _ext.metal.plan_attention(*case.arrays, scale=1.0, **case.options)
                (launch,) = plan["launches"]
                names.add((launch["pipeline"], tuple(launch["constants"].items())))
        assert len({pipeline for pipeline, _ in names}) == len(names)
        assert len(names) == 2 * 11

    def test_the_split_depends_on_shapes_alone(self):
        def splits(batch, columns):
            tables = mx.zeros((batch, columns), mx.int32)
            case = random_case([5] * batch)
            call = _ext.metal.plan_attention(*case.arrays[:3], tables, case.context_lens, scale=1.0)
            return call["launches"][0]["grid"][2]

        assert [splits(1, 16), splits(1, 17), splits(1, 256), splits(64, 256)] == [1, 2, 16, 1]

    def test_unsupported_heads_are_named(self):
        assert _ext.metal.unsupported(64, 128) == ""
        assert "head dimension of 65" in _ext.metal.unsupported(64, 65)
        assert "head dimension of 260" in _ext.metal.unsupported(260, 64)


def test_an_engine_runs_on_the_metal_kernels(monkeypatch):
    """Greedy tokens of a tiny model whose every paged op runs in the emulator are mlx-lm's own."""
    model = tiny_model("llama", num_hidden_layers=2)
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
