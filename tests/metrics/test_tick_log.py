"""The ring buffer of ticks and its summary."""

import json
import statistics

import numpy as np
import pytest

from mlx_paged.metrics.recorder import BUCKETS_MS, TickLog
from mlx_paged.metrics.tick import PARTS, PHASES, TIMES, Tick

TIMINGS = np.random.default_rng(0).exponential(20.0, 100).tolist()


def filled(log: TickLog, **fields: int) -> TickLog:
    for ms in TIMINGS:
        log.add(Tick(tick_ms=ms, wait_ms=ms, **fields))
    return log


def test_the_oldest_ticks_go_first():
    log = filled(TickLog(capacity=10))
    assert len(log) == 10 and [tick.index for tick in log] == list(range(90, 100))
    assert log[-1].tick_ms == TIMINGS[-1]


def test_percentiles_are_those_of_the_ticks_that_are_held():
    found = filled(TickLog(capacity=40), decode_tokens=1).summary()
    held = sorted(TIMINGS[-40:])
    centiles = statistics.quantiles(held, n=100, method="inclusive")
    for name in ("tick_ms", "wait_ms", "decode_tick_ms"):
        assert found[name] == pytest.approx(
            {"count": 40, "p50": centiles[49], "p95": centiles[94], "p99": centiles[98]}
            | {"max": held[-1]}
        )
    assert found["prefill_chunk_ms"]["count"] == 0


@pytest.mark.parametrize("name", ["prefill_tokens", "launched_prefill_tokens"])
def test_a_tick_with_prompt_tokens_is_a_chunks(name):
    found = filled(TickLog(), **{name: 5}).summary()
    assert found["prefill_chunk_ms"]["count"] == 100 and found["decode_tick_ms"]["count"] == 0


def test_totals_and_histograms_outlive_the_ring():
    log = filled(TickLog(capacity=1), decode_tokens=1)
    assert log.total_ms["wait_ms"] == pytest.approx(sum(TIMINGS))
    assert log.total_ms["launch_ms"] == 0
    assert log.decode.sum_ms == pytest.approx(sum(TIMINGS))
    expected, _ = np.histogram(TIMINGS, [0, *BUCKETS_MS, np.inf])
    assert log.decode.counts == expected.tolist() and sum(log.prefill.counts) == 0


def test_a_bucket_holds_its_upper_bound():
    log = TickLog()
    log.add(Tick(tick_ms=BUCKETS_MS[3]))
    assert log.decode.counts[3] == 1


def test_phases_are_unknown_unless_profiled():
    assert all(filled(TickLog()).summary()[name] is None for name in PHASES)
    log = TickLog(profile=True)
    log.add(Tick(tick_ms=5, **dict.fromkeys(PHASES, 1.0)))
    found = log.summary()
    assert found["profile"] and all(found[name]["max"] == 1.0 for name in PHASES)


def test_a_summary_and_a_tick_are_json():
    log = filled(TickLog(spike_ms=50), decode_tokens=1)
    found = json.loads(json.dumps(log.summary()))
    assert len(found["spikes"]) == sum(ms > 50 for ms in TIMINGS) > 0
    assert found["spike_causes"] == {"device": len(found["spikes"])}
    spiky = next(tick for tick in log if tick.causes)
    assert json.loads(json.dumps(spiky.as_dict()))["causes"] == ["device"]


def test_an_empty_log_has_a_summary():
    assert TickLog().summary()["tick_ms"] == {"count": 0, "p50": 0, "p95": 0, "p99": 0, "max": 0}


def test_names_are_told_apart_by_what_they_measure():
    assert set(PARTS) | set(PHASES) < set(TIMES)
