"""The serving bench's numbers, from runs written by hand."""

import numpy as np
import pytest

from bench.flags.limits import Slo, Stall
from bench.serving.measures import (
    goodput,
    itls_ms,
    kv_memory,
    merge,
    percentiles,
    ratios,
    summarize,
    tpots_ms,
    ttfts_ms,
)
from bench.serving.phases import causes_of, find_spikes, spike_threshold, split
from bench.serving.results import phase_lines
from bench.serving.run import Run, Stream, Tick
from bench.serving.session import search

MIB = 2**20


def tick(start_s=0.0, tick_ms=10.0, running=4, tokens=1, **fields):
    base = {"prompt_tokens": 0, "waiting": 0, "joined": 0, "left": 0}
    base |= {"held_bytes": 0, "live_bytes": 0.0}
    return Tick(start_s, tick_ms, tokens=tokens, running=running, **(base | fields))


def ticks_of(running):
    return [tick(0.01 * i, running=each) for i, each in enumerate(running)]


def stream(arrival_s, *times_s, is_done=True):
    return Stream(0, arrival_s, list(times_s), [5] * len(times_s), is_done)


def test_percentiles_are_those_of_numpy():
    values = np.random.default_rng(0).exponential(50, 999).tolist()
    found = percentiles(values)
    for name, q in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100)):
        assert found[name] == pytest.approx(np.percentile(values, q), abs=1e-3)
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None, "max": None}


def test_latencies_count_from_the_scheduled_arrival_and_between_a_streams_own_tokens():
    streams = [stream(1.0, 1.5, 1.7, 2.1), stream(3.0, 3.25), stream(9.0, is_done=False)]
    assert ttfts_ms(streams) == pytest.approx([500, 250])
    assert itls_ms(streams) == pytest.approx([200, 400])
    assert tpots_ms(streams) == pytest.approx([300])


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        ("ttft=500ms", 2),
        ("ttft=0.6s", 3),
        ("ttft=600,itl=250", 2),
        ("itl=0.25s", 2),  # the one that was interrupted does not count
        ("tpot=310ms", 3),
        ("ttft=1ms", 0),
    ],
)
def test_goodput_counts_streams_that_kept_every_limit(slo, num_good):
    streams = [
        stream(0.0, 0.4, 0.6, 1.0),  # gaps 200 and 400, 300 on average
        stream(0.0, 0.5, 0.7),
        stream(1.25, 1.8),
        stream(0.0, 0.1, is_done=False),
    ]
    run = Run("engine", ticks=[tick(0.0, 2000.0, tokens=7)], streams=streams)
    found = goodput(run, Slo.parse(slo))
    assert found is not None
    assert found["streams_per_sec"] == pytest.approx(num_good / 2)
    assert found["attainment"] == pytest.approx(num_good / 4)
    good = [s for s in streams if Slo.parse(slo).holds(s)]
    assert found["tokens_per_sec"] == pytest.approx(sum(len(s.tokens) for s in good) / 2)
    assert goodput(run, None) is None


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=-1", "e2e=5", "ttft=1,ttft=2", "itl=x"]
)
def test_limits_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError, match=r"expected limits on ttft, itl or tpot.* got "):
        Slo.parse(text)


def test_steady_is_from_the_first_to_the_last_tick_near_the_target():
    phases = split(ticks_of([1, 5, 9, 10, 4, 10, 9, 8, 1]), target_active=10)
    assert (phases.ramp.ticks, phases.steady.ticks, phases.tail.ticks) == (2, 5, 2)
    assert phases.ramp.seconds == pytest.approx(0.02)
    assert phases.steady.seconds == pytest.approx(0.05)
    assert phases.tail.seconds == pytest.approx(0.02)
    assert phases.steady.tokens_per_sec == pytest.approx(100)


def test_a_run_that_never_gets_near_the_target_is_measured_by_its_median():
    phases = split(ticks_of([1, 3, 3, 2, 3, 1, 1]), target_active=32)
    assert (phases.ramp.ticks, phases.steady.ticks, phases.tail.ticks) == (1, 4, 2)


def test_idle_time_belongs_to_the_phase_it_falls_into():
    ticks = [tick(0.0, running=4), tick(1.0, running=4), tick(3.0, running=1)]
    phases = split(ticks, target_active=4)
    assert phases.steady.seconds == pytest.approx(3.0)  # until the tail's first tick
    assert phases.tail.seconds == pytest.approx(0.01)
    total = phases.ramp.seconds + phases.steady.seconds + phases.tail.seconds
    assert total == pytest.approx(3.01)


def test_no_ticks_have_no_phases():
    phases = split([], target_active=4)
    assert phases.steady.ticks == 0 and phases.spikes == () and phases.steady.tokens_per_sec == 0


@pytest.mark.parametrize(("usual_ms", "threshold_s"), [(10.0, 0.05), (100.0, 0.2)])
def test_a_spike_is_five_medians_or_a_fifth_of_a_second(usual_ms, threshold_s):
    ticks = [tick(tick_ms=usual_ms) for _ in range(9)] + [tick(tick_ms=1000 * threshold_s)]
    assert spike_threshold(ticks) == pytest.approx(threshold_s)
    [spike] = find_spikes(ticks, spike_threshold(ticks))
    assert spike.tick == 9 and spike.causes == ("unknown",)


@pytest.mark.parametrize(
    ("fields", "causes"),
    [
        ({"stall_ms": 90.0}, ("injected stall",)),
        ({"stall_ms": 25.0, "gc_ms": 60.0, "off_cpu_ms": 5.0}, ("injected stall", "gc")),
        ({"off_cpu_ms": 50.0, "prompt_tokens": 9}, ("host", "prefill")),
        ({"off_cpu_ms": 90.0, "prompt_tokens": 9}, ("host",)),
        ({"preemptions": 1, "cow_clones": 2, "prompt_tokens": 9}, ("prefill", "cow", "preemption")),
        ({"joined": 1, "left": 2, "grown_bytes": 3}, ("join", "leave", "growth")),
        ({"prompt_tokens": 9, "causes": ("eviction",)}, ("eviction",)),
        ({"gc_ms": 40.0, "causes": ("gc", "prefill")}, ("gc", "prefill")),
        ({"prompt_tokens": 8}, ("unknown",)),  # too few to be a cause
        ({}, ("unknown",)),
    ],
)
def test_causes_are_measured_parts_first_then_what_the_engine_says_or_what_happened(fields, causes):
    assert causes_of(tick(tick_ms=100.0, **fields)) == causes


def test_a_busy_machine_is_no_cause_of_what_took_long_with_as_much_of_it_as_ever():
    ticks = [tick(tick_ms=10.0, off_cpu_ms=5.0) for _ in range(9)]
    ticks += [
        tick(tick_ms=90.0, off_cpu_ms=50.0, prompt_tokens=9),
        tick(tick_ms=90.0, off_cpu_ms=80.0),
    ]
    assert [spike.causes for spike in find_spikes(ticks, 0.05)] == [("prefill",), ("host",)]


def test_waste_is_held_over_live_and_weighs_ticks_by_their_time():
    ticks = [
        tick(0.0, 10.0, held_bytes=4 * MIB, live_bytes=2 * MIB),
        tick(0.01, 30.0, held_bytes=8 * MIB, live_bytes=6 * MIB),
        tick(0.04, 0.0, held_bytes=0, live_bytes=0),
    ]
    memory = kv_memory(Run("engine", ticks=ticks, pool_bytes=16 * MIB))
    assert memory["kv_held_mean_mib"] == 7 and memory["kv_live_mean_mib"] == 5
    assert memory["kv_held_peak_mib"] == 8 and memory["kv_live_peak_mib"] == 6
    assert memory["kv_held_over_live"] == pytest.approx(7 / 5)
    assert memory["kv_held_over_live_at_peak"] == pytest.approx(8 / 6, abs=1e-4)
    assert memory["kv_pool_mib"] == 16


def test_a_run_lasts_from_the_first_arrival_to_the_end_of_the_last_tick():
    run = Run("engine", ticks=[tick(2.5, 500.0, tokens=6)], streams=[stream(2.0, 3.0)])
    summary = summarize(run, target_active=4)
    assert summary["wall_s"] == 1.0
    assert summary["output_tokens_per_sec"] == summary["continuous_tokens_per_sec"] == 6.0
    assert summary["continuous_steady_tokens_per_sec"] == 12.0
    *phases, spikes, spike = phase_lines(summary)
    assert [line.split("]")[0] for line in phases] == [
        "[phase ramp",
        "[phase steady",
        "[phase tail",
    ]
    assert spikes == "[phase spikes] count=1 time=0.50s threshold=0.2000s"
    assert spike == "  tick 0 at 2.50 s: 500.0 ms, unknown"


def test_rounds_are_merged_by_medians_and_compared_round_by_round():
    a, b, c = ({"output_tokens_per_sec": v, "n": {"k": v}, "s": [v]} for v in (10.0, 30.0, 20.0))
    assert merge([a, b, c]) == {"output_tokens_per_sec": 20.0, "n": {"k": 20.0}, "s": [10.0]}
    assert merge([{"count": 3, "none": None}, {"count": 4, "none": None}])["count"] == 3
    names = ("continuous_steady_tokens_per_sec", "kv_held_peak_mib", "peak_mlx_mib")
    slow = [{"output_tokens_per_sec": v} | dict.fromkeys(names, 1.0) for v in (5.0, 5.0, 2.0)]
    fast = [each | dict.fromkeys(names, 2.0) for each in (a, b, c)]
    found = ratios({"fast": fast, "slow": slow})["fast / slow"]
    assert found["output_tokens_per_sec"] == 6.0  # of 2, 6 and 10
    assert found["kv_held_peak_mib"] == 2.0


@pytest.mark.parametrize(("limit", "start"), [(7.3, 2.0), (7.3, 30.0), (7.3, 7.3), (2.1, 2.0)])
def test_the_rate_search_comes_close_to_the_highest_rate_from_below(limit, start):
    rates = []

    def attainment(rate):
        rates.append(rate)
        return 1.0 if rate <= limit else 0.5

    found = search(attainment, start, 0.9)
    assert found is not None and found <= limit < found * 1.6 ** (1 / 4) + 1e-9
    assert len(rates) == len(set(rates)) <= 8


def test_the_rate_search_gives_up_in_both_directions():
    assert search(lambda rate: 0.0, 5.0, 0.9) is None
    best = search(lambda rate: 1.0, 5.0, 0.9)
    assert best == pytest.approx(5.0 * 1.6**4)


@pytest.mark.parametrize("text", ["300", "@3", "0@1", "300@-1", "x@1", "nan@1", "300@1.5"])
def test_a_stall_names_its_length_and_its_tick(text):
    with pytest.raises(ValueError, match="expected MILLISECONDS@TICK"):
        Stall.parse(text)
    assert Stall.parse("300@20") == Stall(0.3, 20)
