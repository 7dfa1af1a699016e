"""K/V that a step must read and memory of other caches, against plain loops."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_paged.engine.core import EngineCore
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.metrics.recorder import STOCK_GROWTH, KVReads, Reads, record_memory
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.scheduler.scheduler import Scheduler
from tests.support.simulation.fake_model import FakeClock, FakeRunner
from tests.support.simulation.hash_model import VOCAB

SIZE = 4
TOKEN_BYTES = 24
PROMPT = [7 * i % VOCAB for i in range(40)]
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
        record_memory(stats, reads([], [(0, n) for n in lengths]))
    grown = [[len(range(0, n, STOCK_GROWTH)) * STOCK_GROWTH for n in each] for each in moments]
    assert stats.contiguous_kv_bytes == TOKEN_BYTES * max(map(sum, grown))
    assert stats.padded_kv_bytes == TOKEN_BYTES * max(len(each) * max(each) for each in grown)
    assert stats.peak_live_tokens == max(map(sum, moments))


def token_times(prompts: list[list[int]], max_tokens: int) -> tuple[EngineStats, dict[int, list]]:
    """The statistics after all prompts, and when each request got its tokens, in seconds."""
    clock, allocator = FakeClock(), BlockAllocator(60, SIZE)
    engine = EngineCore(
        Scheduler(allocator, max_running=8, prefill_chunk=8, clock=clock),
        FakeRunner(allocator, clock, random.Random(0), recurrent=False),
        EngineStats(SIZE, 1, 60),
        vocab_size=VOCAB,
        lookahead=False,
    )
    times = {engine.add_request(p, max_tokens=max_tokens, ignore_eos=True): [] for p in prompts}
    while engine.has_work:
        for output in engine.step():
            times[output.request_id].append(clock.now)
    return engine.stats, times


def test_the_rates_of_one_request_are_those_that_mlx_lm_prints():
    """mlx_lm.stream_generate: prompt tokens over the time to the first token, all tokens over the
    time after it."""
    stats, times = token_times([PROMPT], max_tokens=9)
    ((first, *_, last),) = times.values()
    rates = stats.as_dict()
    assert rates["prompt_tokens_per_sec"] == pytest.approx(40 / first)
    assert rates["generation_tokens_per_sec"] == pytest.approx(9 / (last - first))


def test_the_rates_of_a_batch_are_of_the_steps_that_did_such_work():
    """The second prompt is computed beside the first request's decodes."""
    stats, times = token_times([PROMPT[1:9], PROMPT], max_tokens=9)
    (first, *_), (second, *_, last) = times.values()
    assert stats.prompt_tokens / stats.as_dict()["prompt_tokens_per_sec"] == pytest.approx(second)
    assert 18 / stats.as_dict()["generation_tokens_per_sec"] == pytest.approx(last - first)


def test_one_token_of_each_request_is_counted_over_all_time():
    stats, times = token_times([PROMPT[1:9], PROMPT], max_tokens=1)
    rate = stats.as_dict()["generation_tokens_per_sec"]
    assert rate == pytest.approx(2 / max(map(max, times.values())))
