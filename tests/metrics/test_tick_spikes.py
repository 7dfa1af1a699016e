"""Which ticks are spikes, and their causes, on made-up ticks."""

import pytest

from mlx_paged.metrics.recorder import FACTOR, FLOOR_MS, MIN_RECENT, SpikeDetector
from mlx_paged.metrics.tick import Spike, Tick

USUAL = {"schedule_ms": 1.0, "launch_ms": 20.0, "wait_ms": 6.0, "output_ms": 2.0, "other_ms": 1.0}


def tick(decode_tokens: int = 8, **changes: float) -> Tick:
    """A usual tick of 30 ms with `changes`."""
    parts = USUAL | {name: ms for name, ms in changes.items() if name in (*USUAL, "gc_ms")}
    fields = USUAL | {"decode_tokens": decode_tokens} | changes
    return Tick(tick_ms=sum(parts.values()), **fields)


def judged(*ticks: Tick, threshold_ms: float | None = None, usual: int = 20) -> list[Spike]:
    """The spikes among `ticks`, which follow `usual` usual ones."""
    detector = SpikeDetector(threshold_ms)
    return [spike for each in [*[tick()] * usual, *ticks] for spike in detector.add(each)]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"launch_ms": 320, "launched_prefill_tokens": 64, "prefill_tokens": 64}, "prefill"),
        ({"wait_ms": 320, "prefill_tokens": 64}, "prefill"),
        ({"wait_ms": 320, "launched_prefill_tokens": 64}, "device"),
        ({"schedule_ms": 300, "preemptions": 1}, "preemption"),
        ({"schedule_ms": 300, "evictions": 9}, "eviction"),
        ({"schedule_ms": 300, "cow_clones": 3}, "cow"),
        ({"wait_ms": 320, "cow_clones": 3}, "cow"),
        ({"launch_ms": 320, "prewarm_ms": 326}, "prewarm"),
        ({"gc_ms": 300}, "gc"),
        ({"gc_elsewhere_ms": 290, "launch_ms": 320}, "gc"),
        ({"schedule_ms": 300}, "host"),
        ({"output_ms": 300}, "host"),
        ({"other_ms": 300}, "host"),
        ({"other_ms": 300, "faults": 1}, "fault"),
        ({"launch_ms": 320}, "launch"),
        ({"wait_ms": 320}, "device"),
    ],
    ids=str,
)
def test_the_part_with_the_excess_names_the_cause(changes, cause):
    slow = tick(**changes)
    (spike,) = judged(slow)
    assert spike.causes == slow.causes == (cause,)
    assert spike.tick_ms == slow.tick_ms and spike.threshold_ms == 90


def test_two_causes_are_told_in_the_order_of_their_excess():
    (spike,) = judged(tick(gc_ms=120, wait_ms=206))
    assert spike.causes == ("device", "gc")


def test_a_small_part_is_no_cause():
    (spike,) = judged(tick(gc_ms=20, wait_ms=306))
    assert spike.causes == ("device",)


def test_clones_and_evictions_as_many_as_usual_are_not_to_blame():
    usual = [tick(cow_clones=2, evictions=2) for _ in range(20)]
    slow = [tick(cow_clones=2, wait_ms=306), tick(evictions=2, schedule_ms=306)]
    causes = [spike.causes for spike in judged(*usual, *slow, usual=0)]
    assert causes == [("device",), ("host",)]


def test_a_spike_takes_more_than_a_multiple_of_the_usual():
    usual_ms = tick().tick_ms
    below, above = FACTOR * usual_ms - 1, FACTOR * usual_ms + 1
    slow = [tick(wait_ms=ms - usual_ms + USUAL["wait_ms"]) for ms in (below, above)]
    (spike,) = judged(*slow)
    assert spike.tick_ms == pytest.approx(above)


def test_below_the_floor_nothing_is_a_spike():
    fast = [Tick(tick_ms=1, wait_ms=1, decode_tokens=8) for _ in range(20)]
    slow = [Tick(tick_ms=ms, wait_ms=ms, decode_tokens=8) for ms in (FLOOR_MS, FLOOR_MS + 1)]
    (spike,) = judged(*fast, *slow, usual=0)
    assert spike.tick_ms == FLOOR_MS + 1


def test_a_given_threshold_holds_from_the_first_tick_on():
    slow = tick(wait_ms=100)
    (spike,) = judged(slow, threshold_ms=60, usual=0)
    assert (spike.threshold_ms, spike.causes) == (60, ("device",))
    assert not judged(tick(wait_ms=30), threshold_ms=60, usual=0)


def test_a_usual_tick_above_a_low_threshold_is_explained_by_its_parts():
    hardly_slower = tick(schedule_ms=2)
    *spikes, last = judged(hardly_slower, threshold_ms=10, usual=20)
    assert len(spikes) == 20 and {spike.causes for spike in spikes} == {("launch",)}
    assert last.causes == ("launch",)


def test_early_ticks_are_judged_when_it_is_known_what_is_usual():
    slow = tick(launch_ms=500, prewarm_ms=506)
    detector = SpikeDetector()
    ticks = [slow, *[tick() for _ in range(MIN_RECENT)]]
    found = [list(detector.add(each)) for each in ticks]
    assert [len(spikes) for spikes in found] == [0] * (MIN_RECENT - 1) + [1, 0]
    assert slow.causes == ("prewarm",)


def test_streams_are_used_to_decodes_alone():
    """Steps with chunks do not raise the usual time."""
    mixed = [tick(prefill_tokens=64, wait_ms=106) for _ in range(40)]
    spikes = judged(*mixed)
    assert len(spikes) == 40 and {spike.causes for spike in spikes} == {("prefill",)}


def test_ticks_without_streams_are_compared_among_themselves():
    chunks = [tick(decode_tokens=0, prefill_tokens=512, wait_ms=306) for _ in range(20)]
    slow = tick(decode_tokens=0, prefill_tokens=512, wait_ms=2000)
    assert [spike.tick_ms for spike in judged(*chunks, slow)] == [slow.tick_ms]
