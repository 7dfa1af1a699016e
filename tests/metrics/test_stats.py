"""What other caches would have cost, against sizes worked out row by row."""

from types import SimpleNamespace

import numpy as np

from mlx_paged.metrics.stats import STOCK_GROWTH, EngineStats, KVReads

TOKEN_BYTES = 24


def test_other_caches_grow_in_steps_of_256_tokens():
    rng = np.random.default_rng(0)
    moments = [rng.integers(1, 1200, rng.integers(1, 9)).tolist() for _ in range(30)]
    stats = EngineStats(block_size=16, block_bytes=16 * TOKEN_BYTES, num_blocks=99)
    for lengths in moments:
        spans = [SimpleNamespace(start=0, stop=n) for n in lengths]
        stats.record_memory(KVReads({}, 16).contexts(spans))
    grown = [[len(range(0, n, STOCK_GROWTH)) * STOCK_GROWTH for n in each] for each in moments]
    assert stats.contiguous_kv_bytes == TOKEN_BYTES * max(map(sum, grown))
    assert stats.padded_kv_bytes == TOKEN_BYTES * max(len(each) * max(each) for each in grown)
    assert stats.peak_live_tokens == max(map(sum, moments))
