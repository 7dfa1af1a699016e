"""Sequences that begin with the same blocks, on the Metal kernels: run by the emulator with
eval_gpu's plans. One launch computes what several share, another one each sequence's own keys."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_shared_prefixes import prefixes_of, shared

from mlx_paged import _ext, ops
from mlx_paged.ops import dispatch
from tests.metal_emulator import Mode
from tests.support.engine.refusing_gpu import RefusingGPU
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.paged_cases import TOLERANCE, Case, latent_case, random_case, worst_error
from tests.support.ops.quantized_cases import quantized_case

SPLIT = 256  # shared keys of a split, where threadgroups are few
FEWEST = 64  # shared keys of a split that are computed together
KEYS, VALUES = 1, 2
"""Buffer indices."""

WAYS = {"shuffled": (Mode.FAST, 7), "race check": (Mode.RACE, 3)}


@pytest.fixture
def metal() -> MetalRunner:
    """Threads in a random order, and watched; any finding raises."""
    return MetalRunner(*WAYS["race check"])


def run(metal: MetalRunner, case: Case, prefixes: mx.array | None) -> mx.array:
    options = case.options if prefixes is None else {**case.options, "shared_prefixes": prefixes}
    q, k_cache, v_cache, tables, lens = case.arrays
    return metal.paged_attention(q, [k_cache], [v_cache], tables, lens, **options)


def assert_shares(metal: MetalRunner) -> None:
    """Of the three launches the first one computed shared keys."""
    of_shared, own, merge = metal.trace.pipelines
    assert of_shared.startswith("matrix_attention_") and "_22_1_" in of_shared
    assert of_shared.endswith("_23_1") and "_22_1" in own and not own.endswith("_23_1")
    assert merge.startswith("merge_splits_") and merge.endswith("_22_1")


def assert_matches_float64(
    metal: MetalRunner, case: Case, prefixes: mx.array, expected: Case | None = None
) -> None:
    out = run(metal, case, prefixes)
    want, _ = (expected or case).expected()
    assert worst_error(out, want) < TOLERANCE[out.dtype]
    assert_shares(metal)


def with_padding(case: Case, prefixes: mx.array, count: int) -> tuple[Case, mx.array]:
    """With rows of padding, as a compiled graph has them: no keys, and zeros for all else."""
    more = (0, count)
    padded = replace(
        case,
        q=mx.pad(case.q, [more, (0, 0), (0, 0), (0, 0)]),
        block_tables=mx.pad(case.block_tables, [more, (0, 0)]),
        context_lens=mx.pad(case.context_lens, more),
    )
    return padded, mx.pad(prefixes, [(0, 0), more])


def same_first_blocks(case: Case, blocks: int) -> mx.array:
    """Let all sequences begin with the first one's blocks."""
    tables = np.array(case.block_tables)
    tables[1:, :blocks] = tables[0, :blocks]
    case.block_tables = mx.array(tables)
    return prefixes_of(case)


def few(contexts: list[int], **sizes: Any) -> Case:
    sizes = {"dtype": mx.float16, "head_dim": 32, "num_heads": 2, "num_kv_heads": 1} | sizes
    return random_case(contexts, **sizes)


class TestTrees:
    @pytest.mark.heavy
    @pytest.mark.sampled(20)
    @pytest.mark.parametrize("seed", range(40))
    def test_random_ones(self, seed):
        """Of sequences in any order, and some rows of padding."""
        rng = np.random.default_rng(seed)
        metal = MetalRunner(*WAYS["race check" if seed % 2 else "shuffled"])
        heads = int(rng.choice([1, 2]))
        contexts = rng.integers(3, 1100, int(rng.integers(2, 9))).tolist()
        case = random_case(
            [*contexts, 800],
            num_kv_heads=heads,
            num_heads=heads * int(rng.choice([1, 2, 3, 4, 8])),
            head_dim=int(rng.choice([32, 64])),
            block_size=int(rng.choice([8, 16, 48])),
            dtype=mx.float16 if rng.random() < 0.5 else mx.bfloat16,
            options=rng.choice(["sinks", "softcap", "non_causal"], 1).tolist(),
            seed=seed,
        )
        prefixes = shared(case, rng)
        if "sinks" not in case.options and rng.random() < 0.7:
            case, prefixes = with_padding(case, prefixes, int(rng.integers(1, 4)))
        assert_matches_float64(metal, case, prefixes)

    @pytest.mark.heavy
    @pytest.mark.sampled(7)
    @pytest.mark.parametrize("common", [48, 64, 240, 256, 272, 304, 320, 512, 528, 576])
    def test_ends_of_splits(self, metal, common):
        """Of shared keys, around those of a split and the fewest that are worth it; contexts end
        there, or soon after."""
        case = few([common + 1, common + 16, common + 17, 700, common + 40])
        assert_matches_float64(metal, case, same_first_blocks(case, common // 16))

    @pytest.mark.heavy
    def test_contexts_that_end_within_the_shared_keys(self, metal):
        """The last shared block is not full: each row sees its own context's keys."""
        case = few([600, 590, 595, 592], block_size=16)
        tables = np.array(case.block_tables)
        tables[:] = tables[0]
        case.block_tables = mx.array(tables)
        place = int(tables[0, 595 // 16]), 595 % 16
        case.v_cache[:, place[0], place[1]] = mx.nan
        prefixes = mx.array([[1, 3, 2, 0], [0, 592, 592, 608]], mx.int32)
        out = run(metal, case, prefixes)
        assert_shares(metal)
        assert mx.isnan(out[0]).all() and not mx.isnan(out[1:]).any()
        want, _ = case.expected()
        assert worst_error(out[1:], want[1:]) < TOLERANCE[mx.float16]

    @pytest.mark.sampled(8)
    @pytest.mark.parametrize("heads", [(4, 1), (3, 1), (16, 2), (2, 2)], ids=str)
    @pytest.mark.parametrize("count", [7, 33])
    def test_more_sequences_than_a_threadgroup_has_rows_for(self, heads, count):
        metal = MetalRunner(*WAYS["shuffled"])
        case = few(
            [SPLIT + 70 + i for i in range(count)], num_heads=heads[0], num_kv_heads=heads[1]
        )
        spare = mx.zeros((count, 40), mx.int32)
        case.block_tables = mx.concatenate([case.block_tables, spare], axis=1)
        assert_matches_float64(metal, case, same_first_blocks(case, SPLIT // 16 + 4))

    def test_a_tree_of_three_levels(self, metal):
        """In one split two of four share all keys, and the others the first ones."""
        case = few([900, 901, 902, 903, 904, 905], block_size=16)
        tables = np.array(case.block_tables)
        tables[1:, :20] = tables[0, :20]
        tables[3, :50] = tables[1, :50]
        tables[5, :34] = tables[2, :34]
        case.block_tables = mx.array(tables)
        prefixes = prefixes_of(case)
        assert sorted(prefixes[1].tolist()) == [0, 320, 320, 320, 544, 800]
        assert_matches_float64(metal, case, prefixes)

    def test_neighbours_share_more_than_all_do(self, metal):
        """Within one split: all compute the keys together that all of them share."""
        case = few([900, 901, 902, 903], block_size=16)
        tables = np.array(case.block_tables)
        for row, blocks in ((1, 40), (2, 38), (3, 36)):
            tables[row, :blocks] = tables[0, :blocks]
        case.block_tables = mx.array(tables)
        prefixes = prefixes_of(case)
        assert len(set(prefixes[1].tolist())) > 2
        assert_matches_float64(metal, case, prefixes)

    @pytest.mark.heavy
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("kv_bits", [8, 4])
    def test_quantized_pools(self, metal, kv_bits):
        case, expected = quantized_case(
            kv_bits, [900, 700, 650, 530], num_heads=8, dtype=mx.float16, seed=1
        )
        prefixes = shared(case, np.random.default_rng(8))
        expected = replace(expected, block_tables=case.block_tables)
        assert_matches_float64(metal, case, prefixes, expected)

    @pytest.mark.heavy
    def test_latents(self, metal):
        case = latent_case([900, 700, 650], 64, 16, num_heads=4, dtype=mx.bfloat16, seed=2)
        prefixes = same_first_blocks(case, 37)
        assert prefixes[1].tolist() == [0, 592, 592]
        assert_matches_float64(metal, case, prefixes)


class TestWhatIsRead:
    def test_shared_keys_come_from_one_table(self, metal):
        """Sequences that say they share what they do not get the first one's keys."""
        case = few([SPLIT + 300] * 5)
        order = [4, 2, 0, 1, 3]
        prefixes = mx.array([order, [0] + [SPLIT + 64] * 4], mx.int32)
        out = run(metal, case, prefixes)
        assert_shares(metal)
        tables = np.array(case.block_tables)
        tables[:, : (SPLIT + 64) // 16] = tables[4, : (SPLIT + 64) // 16]
        want, _ = replace(case, block_tables=mx.array(tables)).expected()
        assert worst_error(out, want) < TOLERANCE[mx.float16]

    @pytest.mark.slow
    @pytest.mark.parametrize(("group", "tiles"), [(1, 1), (2, 1), (4, 2)])
    def test_shared_keys_and_values_are_asked_for_once(self, group, tiles):
        """By each threadgroup of 32 rows; 16 sequences, each with keys of its own."""
        common, own, count = 4096, 64, 16
        case = few([common + own] * count, num_heads=group, head_dim=64)
        metal = MetalRunner(Mode.RACE, 3)
        assert_matches_float64(metal, case, same_first_blocks(case, common // 16))
        for cache in (KEYS, VALUES):
            of_shared, of_own, _ = metal.trace.stats
            asked = of_shared.loaded_bytes[cache] + of_own.loaded_bytes[cache]
            assert asked <= 1.05 * (tiles * common + own * count) * 64 * 2

    def test_partly_shared_splits_are_asked_for_once(self):
        """Sequences with a prompt in common whose end is the end of no split."""
        common, own = 592, 40
        case = few([common + own] * 8)
        metal = MetalRunner(Mode.RACE, 3)
        assert_matches_float64(metal, case, same_first_blocks(case, common // 16))
        asked = [stats.loaded_bytes[KEYS] for stats in metal.trace.stats[:2]]
        assert asked[0] == common * 32 * 2
        assert asked[1] <= 8 * 64 * 32 * 2

    @pytest.mark.heavy
    @pytest.mark.parametrize(
        "prefixes",
        [
            [[5, -1, 2**31 - 1], [0, 4000, 4000]],
            [[0, 0, 0], [-5, 2**31 - 1, -(2**31)]],
            [[2, 1, 0], [2**31 - 1, 2**31 - 1, 2**31 - 1]],
        ],
        ids=["order", "lengths", "all"],
    )
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("mode", [Mode.FAST, Mode.UBSAN], ids=str)
    def test_numbers_out_of_range_read_nothing_outside(self, prefixes, mode):
        metal = MetalRunner(mode, 3)
        out = run(metal, few([600, 700, 650]), mx.array(prefixes, mx.int32))
        assert out.shape == (3, 2, 1, 32)
        assert_shares(metal)


class TestWhen:
    def launches(self, case: Case, **options: Any) -> list[str]:
        call = _ext.metal.plan_attention(*case.arrays, scale=1.0, **{**case.options, **options})
        return [launch["pipeline"] for launch in call["launches"]]

    @pytest.mark.parametrize(
        ("contexts", "sizes", "options"),
        [
            ([900], {}, {}),
            ([400, 300], {}, {}),
            ([900, 800], {"dtype": mx.float32}, {}),
            ([900, 800], {"num_tokens": 2}, {}),
            ([900, 800], {"num_heads": 32}, {}),
            ([900, 800], {"head_dim": 36}, {}),
            ([900, 800], {}, {"window": 300}),
            ([900, 800], {}, {"return_attn": True}),
            ([900, 800], {"options": ["alibi"]}, {}),
            ([900, 800], {"options": ["bool_mask"]}, {}),
            ([900, 800], {"options": ["mapping"]}, {}),
        ],
        ids=str,
    )
    def test_other_calls_are_as_without_the_argument(self, contexts, sizes, options):
        case = few(contexts, **sizes)
        prefixes = mx.zeros((2, len(contexts)), mx.int32)
        with_them = self.launches(case, shared_prefixes=prefixes, **options)
        assert with_them == self.launches(case, **options)

    @pytest.mark.parametrize("begins", [[0, 1, 5], [0, 1, 2]], ids=str)
    @pytest.mark.parametrize("num_decodes", [0, 1, 2])
    def test_ragged_batches_are_as_without_the_argument(self, begins, num_decodes):
        num_decodes = min(num_decodes, 1 if begins[2] > 2 else 2)
        case = few([900, 800])
        ragged = {"cu_seqlens": mx.array(begins), "num_decodes": num_decodes}
        case = replace(case, q=mx.zeros((begins[2], 2, 1, 32), mx.float16))
        with_them = self.launches(case, shared_prefixes=mx.zeros((2, 2), mx.int32), **ragged)
        assert with_them == self.launches(case, **ragged)

    @pytest.mark.heavy
    def test_a_compiler_may_refuse_it(self, monkeypatch):
        """Then the same call is made without the argument."""
        case = few([900, 800, 700])
        prefixes, want = same_first_blocks(case, 36), case.expected()[0]
        q, k_cache, v_cache, *arrays = case.arrays
        for ending, count in (("never", 3), ("_23_1", 2)):
            gpu = RefusingGPU(monkeypatch)
            gpu.metal.refusal = lambda launch, e=ending: (
                "planted" if launch["pipeline"].endswith(e) else ""
            )
            out = ops.paged_attention(q, [k_cache], [v_cache], *arrays, shared_prefixes=prefixes)
            assert worst_error(out, want) < TOLERANCE[mx.float16]
            names = gpu.runner.trace.pipelines[-count:]
            assert names[0].endswith("_23_1") == (count == 3)
            assert all("_22_1" in name for name in names) == (count == 3)
        dispatch.forget()

    def test_partial_results_have_the_memory_of_other_calls(self):
        """The splits of shared and of own keys together."""
        for batch, width in ((2, 2**17), (64, 8192), (256, 8192), (512, 2**15)):
            arrays = (
                mx.zeros((batch, 32, 1, 128), mx.float16),
                *(mx.zeros((8, 2, 16, 128), mx.float16) for _ in range(2)),
                mx.zeros((batch, width // 16), mx.int32),
                mx.ones((batch,), mx.int32),
            )
            prefixes = mx.zeros((2, batch), mx.int32)
            call = _ext.metal.plan_attention(*arrays, scale=1.0, shared_prefixes=prefixes)
            assert sum(call["scratch_bytes"]) <= 1 << 24
            assert len(call["launches"]) == (
                3 if batch < 512 else 1
            )  # the last has no memory for splits
