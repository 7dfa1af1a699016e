"""K/V that a step must read and memory of other caches, against plain loops."""

from types import SimpleNamespace

import numpy as np
import pytest

from mlx_paged.metrics.stats import STOCK_GROWTH, EngineStats, KVReads, Reads

SIZE = 4
TOKEN_BYTES = 24
LAYERS = [(None, 10), (6, 3), (None, 1), (0, 1000), (9, 2)]


def seen(start: int, stop: int, window: int | None) -> set[int]:
    """Positions that any of the tokens ``[start, stop)`` attends to."""
    return {
        key
        for query in range(start, stop)
        for key in range(query + 1)
        if window is None or key > query - window
    }


@pytest.fixture
def spans() -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 40, 50)
    return [(int(s), int(s + n)) for s, n in zip(starts, rng.integers(1, 9, 50), strict=True)]


def reads(layers: list[tuple[int | None, int]], spans: list[tuple[int, int]]) -> Reads:
    spans = [SimpleNamespace(start=start, stop=stop) for start, stop in spans]
    return KVReads(layers, SIZE).of(spans)


def test_bytes_are_those_of_every_position_seen_in_every_layer(spans):
    expected = sum(
        size * len(seen(*span, window)) for span in spans for window, size in LAYERS if window != 0
    )
    assert reads(LAYERS, spans).kv_bytes == expected


@pytest.mark.parametrize("windows", [(None, 6), (6, 9), (6,), (1,)])
def test_blocks_are_those_that_the_widest_window_reaches(spans, windows):
    expected = sum(
        len({p // SIZE for window in windows for p in seen(*span, window)}) for span in spans
    )
    assert reads([(window, 1) for window in windows], spans).blocks == expected


def test_a_model_without_attention_reads_nothing(spans):
    found = reads([(0, 8)], spans)
    assert found.kv_bytes == found.blocks == 0


def test_other_caches_grow_in_steps_of_256_tokens():
    rng = np.random.default_rng(0)
    moments = [rng.integers(1, 1200, rng.integers(1, 9)).tolist() for _ in range(30)]
    stats = EngineStats(block_size=16, block_bytes=16 * TOKEN_BYTES, num_blocks=99)
    for lengths in moments:
        stats.record_memory(reads([], [(0, n) for n in lengths]))
    grown = [[len(range(0, n, STOCK_GROWTH)) * STOCK_GROWTH for n in each] for each in moments]
    assert stats.contiguous_kv_bytes == TOKEN_BYTES * max(map(sum, grown))
    assert stats.padded_kv_bytes == TOKEN_BYTES * max(len(each) * max(each) for each in grown)
    assert stats.peak_live_tokens == max(map(sum, moments))
