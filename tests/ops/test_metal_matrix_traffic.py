"""What the Metal kernel for chunks loads, and how often its threads wait for each other."""

import mlx.core as mx
import pytest
from test_metal_matrix import assert_matches_float64, by_matrices

from tests.metal_emulator import LaunchStats, Mode
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.paged_cases import Case, latent_case

KEYS, VALUES, TABLES = 1, 2, 3
"""Buffer indices."""


class TestTraffic:
    def stats(self, case: Case) -> LaunchStats:
        metal = MetalRunner(Mode.RACE)
        assert_matches_float64(metal, case)
        return metal.trace.stats[0]

    @pytest.mark.slow
    @pytest.mark.parametrize("window", [None, 99])
    def test_a_threadgroup_loads_each_byte_once(self, window):
        """Of keys that its rows see; and an entry of the table once for each key."""
        case = by_matrices([300, 1, 77], 5, head_dim=128)
        case.options["window"] = window
        seen = sum(min(n, n if window is None else window + 4) for n in (300, 1, 77))
        stats = self.stats(case)
        for buffer in (KEYS, VALUES):
            unique = stats.unique_loaded_bytes[buffer]
            assert stats.loaded_bytes[buffer] == unique.per_threadgroup == unique.per_launch
            assert unique.per_launch == seen * 2 * 128 * 2
            assert stats.loaded_bytes[buffer] == 128 * stats.lines[buffer].loaded
        assert stats.loaded_bytes[TABLES] == 4 * 2 * seen

    def test_later_keys_are_not_loaded_for_earlier_rows(self):
        """16 tokens of 2 heads fill a threadgroup: the first sees 16 keys, the second 32."""
        case = by_matrices([32], 32, num_heads=4, head_dim=64)
        assert self.stats(case).loaded_bytes[KEYS] == (16 + 32) * 2 * 64 * 2

    @pytest.mark.slow
    def test_values_that_are_columns_of_the_keys_are_not_loaded(self):
        case = latent_case([300, 20], 64, 16, num_heads=16, dtype=mx.float16)
        stats = self.stats(case)
        assert stats.loaded_bytes[KEYS] == stats.loaded_bytes[VALUES] == 320 * 80 * 2

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(
        ("num_heads", "head_dim", "keys", "others"),
        [(1, 128, 32, 3), (4, 128, 16, 3), (2, 256, 16, 2)],
        ids=["kept", "many rows kept", "staged"],
    )
    def test_a_step_has_four_barriers(self, num_heads, head_dim, keys, others):
        """One before the first step, after the queries are staged, and one after the last. Where
        simdgroups then move them to registers, keys take their place: after another one."""
        case = by_matrices([320], 8, num_heads=num_heads, num_kv_heads=1, head_dim=head_dim)
        assert self.stats(case).barriers == 4 * 320 // keys + others

    @pytest.mark.slow
    def test_32_rows_of_128_elements_take_at_most_16_kib(self):
        case = by_matrices([45], 64, head_dim=128)
        assert self.stats(case).threadgroup_bytes <= 16 << 10

    def test_every_step_multiplies_matrices(self):
        """Also the steps at both edges of a window: 9 or 10 of 32 keys for 8 rows in all."""
        case = by_matrices([320], 8, num_heads=1, num_kv_heads=1, head_dim=128)
        case.options["window"] = 41
        steps = 2  # The keys from 272 on, as the first query sees 272 and the last one 319.
        dims = 128 // 8
        assert self.stats(case).matrix_multiplications == steps * 2 * (32 // 8) * dims
