"""Operations to compute known content again, per byte, and how often it is used."""

import random
from math import log2

import pytest

from mlx_paged.kv.frequency import ONE, log2_of, together
from mlx_paged.kv.snapshots import Snapshot, Snapshots
from mlx_paged.kv.worth import KIB, Pairs, TextWorth, Work, worth


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_work_is_that_of_all_tokens_one_by_one(window):
    work = Work(1000, (Pairs(window, 3), Pairs(None, 5)))
    own = [
        1000 + 3 * min(position + 1, window or position + 1) + 5 * (position + 1)
        for position in range(60)
    ]
    for start in range(0, 60, 7):
        for stop in range(start, 60, 5):
            assert work.of(start, stop) == sum(own[start:stop])


def test_worth_is_per_kib_and_of_whole_operations():
    assert worth(10**6, 512 * KIB) == 1953
    assert worth(3, 10**9) == 1
    of_text = TextWorth(Work(4, (Pairs(None, 2),)), 2 * KIB, KIB)
    assert of_text.of_block(16, 32) == (4 * 16 + 2 * sum(range(17, 33))) // 2
    assert of_text.of_states(16) == 4 * 16 + 2 * sum(range(1, 17))


def test_scores_are_logarithms_of_sums():
    rng = random.Random(1)
    for _ in range(200):
        times = [rng.uniform(0, 40) for _ in range(rng.randrange(1, 6))]
        score = int(times[0] * ONE)
        for time in times[1:]:
            score = together(score, int(time * ONE))
        exact = log2(sum(2**time for time in times))
        assert score / ONE == pytest.approx(exact, abs=0.02)
    for number in [1, 2, 3, 1000, 2**80 + 12345]:
        assert log2_of(number) / ONE == pytest.approx(log2(number), abs=1 / 170)
    numbers = sorted(rng.randrange(1, 1 << 40) for _ in range(500))
    scores = [log2_of(number) for number in numbers]
    assert scores == sorted(scores)


def test_snapshots_are_kept_by_the_operations_that_they_save():
    """Where attention takes most, a gap late in a text costs more than a longer early one."""
    for pairs, kept in (((), [160, 900]), ((Pairs(None, 1),), [900, 1000])):
        snapshots = Snapshots(2, worth=TextWorth(Work(1, pairs), KIB, KIB))
        first = Snapshot(900)
        assert snapshots.add(0, 4, first)
        assert snapshots.add(1, 4, Snapshot(1000, before=first))
        assert snapshots.add(2, 4, Snapshot(160)) == (160 in kept)
        assert [block for block in range(3) if block in snapshots] == sorted(
            {900: 0, 1000: 1, 160: 2}[position] for position in kept
        )
