"""What a threadgroup of the Metal decode kernel holds and waits for, as the emulator counts it.

To lose any of it costs time only: the results stay right.
"""

import mlx.core as mx
import pytest
from metal_emulator import LaunchStats, Mode
from metal_runner import MetalRunner
from paged_cases import TOLERANCE, random_case, worst_error

KEYS, VALUES = 1, 2
"""Buffer indices of the attention kernel."""


def one_key(group: int, head_dim: int, v_head_dim: int) -> LaunchStats:
    """A KV head's queries over a context of one key, which a single simdgroup loads."""
    metal = MetalRunner(Mode.RACE)
    case = random_case(
        [1],
        num_heads=group,
        num_kv_heads=1,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=mx.float16,
    )
    q, k_cache, v_cache, tables, lens = case.arrays
    out = metal.paged_attention(q, [k_cache], [v_cache], tables, lens)
    assert worst_error(out, case.expected()[0]) < TOLERANCE[mx.float16]
    (stats,) = metal.trace.stats
    assert stats.threadgroups == 1
    return stats


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(576, 64), (64, 576), (320, 320), (256, 256)])
def test_a_lane_holds_at_most_20_elements_of_a_key_or_value(head_dim, v_head_dim):
    """Four with each load."""
    lines = one_key(1, head_dim, v_head_dim).lines
    assert 0 < lines[KEYS].load_instructions <= 5
    assert 0 < lines[VALUES].load_instructions <= 5


@pytest.mark.parametrize(
    ("group", "dim", "steps"),
    [(1, 64, 1), (4, 64, 1), (2, 128, 1), (4, 128, 2), (1, 256, 1), (2, 256, 2), (1, 512, 1)],
)
def test_rows_are_merged_in_as_few_steps_as_8_kib_allow(group, dim, steps):
    """With a barrier in each and one before the next, which overwrites what was merged."""
    stats = one_key(group, dim, dim)
    assert stats.barriers == 2 * steps - 1
    outputs = 8 * group * dim * 4 // steps
    assert stats.threadgroup_bytes == outputs + 8 * group * 2 * 4


def test_the_merge_of_splits_loads_each_partial_result_once():
    """Of each split all outputs, and three numbers: its maximum twice, its denominator once."""
    metal = MetalRunner(Mode.RACE)
    case = random_case([4096], num_heads=8, num_kv_heads=2, head_dim=128, dtype=mx.float16)
    q, k_cache, v_cache, tables, lens = case.arrays
    out = metal.paged_attention(q, [k_cache], [v_cache], tables, lens)
    assert worst_error(out, case.expected()[0]) < TOLERANCE[mx.float16]
    attention, merge = metal.trace.stats
    splits = attention.threadgroups // 2
    assert splits > 1
    outputs, sums = (merge.lines[i] for i in (0, 1))
    assert outputs.load_instructions == 8 * splits * 128 // 32
    assert outputs.loaded == outputs.load_instructions
    assert sums.load_instructions == 8 * splits * 3
