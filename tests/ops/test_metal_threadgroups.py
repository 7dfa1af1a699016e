"""What a threadgroup of the Metal decode kernel holds and waits for, as the emulator counts it.

To lose any of it costs time only: the results stay right.
"""

import mlx.core as mx
import pytest

from tests.metal_emulator import LaunchStats, Mode
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.paged_cases import TOLERANCE, random_case, worst_error

KEYS, VALUES, TABLE = 1, 2, 3
"""Buffer indices of the attention kernel."""


def counted(
    contexts: list[int], group: int, head_dim: int, v_head_dim: int | None = None, kv_heads: int = 1
) -> list[LaunchStats]:
    """Of each launch, after a look at the output."""
    metal = MetalRunner(Mode.RACE)
    case = random_case(
        contexts,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=mx.float16,
        spare_columns=0,
    )
    q, k_cache, v_cache, tables, lens = case.arrays
    out = metal.paged_attention(q, [k_cache], [v_cache], tables, lens)
    assert worst_error(out, case.expected()[0]) < TOLERANCE[mx.float16]
    return metal.trace.stats


def one_key(group: int, head_dim: int, v_head_dim: int, sequences: int = 1) -> LaunchStats:
    """A KV head's queries over a context of one key, which a single simdgroup loads."""
    (stats,) = counted([1] * sequences, group, head_dim, v_head_dim)
    assert stats.threadgroups == sequences
    assert stats.threads // sequences == 32 * (8 if sequences < 64 else 4)
    return stats


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(576, 64), (64, 576), (320, 320), (256, 256)])
def test_a_lane_holds_at_most_20_elements_of_a_key_or_value(head_dim, v_head_dim):
    """Four with each load. It asks for four keys at once, here four times for the same one."""
    lines = one_key(1, head_dim, v_head_dim).lines
    assert 4 <= lines[KEYS].load_instructions <= 4 * 5
    assert 4 <= lines[VALUES].load_instructions <= 4 * 5


@pytest.mark.heavy
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("group", "dim"), [(1, 64), (4, 64), (2, 128), (4, 128), (1, 256), (2, 256), (1, 512)]
)
@pytest.mark.parametrize("sequences", [1, 64])
def test_a_threadgroup_waits_after_its_queries_and_before_it_merges(sequences, group, dim):
    """A simdgroup's outputs overwrite its own weights, so that it need not wait for others."""
    stats = one_key(group, dim, dim, sequences)
    assert stats.barriers == 2 * sequences
    simdgroups = stats.threads // sequences // 32
    weights = simdgroups * 32 * 4 * 4
    outputs = simdgroups * group * dim * 4
    queries = group * dim * 2
    no_scales = 16  # an array may not be empty
    sums = simdgroups * group * 2 * 4
    assert stats.threadgroup_bytes == queries + max(weights, outputs) + sums + no_scales


@pytest.mark.heavy
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("group", "head_dim", "most"), [(4, 128, 96), (1, 128, 32), (4, 64, 48), (2, 256, 170)]
)
def test_what_a_tile_of_32_keys_costs(group, head_dim, most):
    """Two tables of keys differ in 256 keys only: two tiles of each simdgroup."""
    few, many = (counted([keys], group, head_dim)[0] for keys in (256, 512))
    tiles = 8
    assert many.simd_ops - few.simd_ops <= most * tiles
    assert many.lines[TABLE].load_instructions - few.lines[TABLE].load_instructions == tiles
    for cache in (KEYS, VALUES):
        loaded = many.loaded_bytes[cache] - few.loaded_bytes[cache]
        assert loaded == 256 * head_dim * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_merge_loads_each_live_partial_result_once(head_dim):
    """Sequences of 2 and 8 splits; also where a simdgroup has more lanes than a row has vectors."""
    _, merge = counted([300, 2048], 4, head_dim, kv_heads=2)
    loaded = 8 * (2 + 8) * 4 * head_dim
    assert merge.loaded_bytes[0] == merge.unique_loaded_bytes[0].per_launch == loaded
