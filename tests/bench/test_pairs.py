"""Courses in turns and the ratios of their pairs."""

import pytest

from bench import pairs
from bench.pairs import in_turns, ratio, turns


def test_each_round_has_all_courses_and_begins_with_another():
    assert list(turns("abc", 4)) == [
        *[(0, "a"), (0, "b"), (0, "c")],
        *[(1, "b"), (1, "c"), (1, "a")],
        *[(2, "c"), (2, "a"), (2, "b")],
        *[(3, "a"), (3, "b"), (3, "c")],
    ]


def test_values_are_by_course_and_in_the_order_of_rounds():
    taken = []
    courses = {name: lambda name=name: taken.append(name) or len(taken) for name in ("a", "b")}
    assert in_turns(courses, 3) == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert "".join(taken) == "abbaab"


def test_rounds_of_the_warm_up_do_not_count():
    count = iter(range(10))
    assert in_turns({"a": lambda: next(count)}, 2, warm_up=3) == {"a": [3, 4]}


def test_no_round_begins_after_the_time_but_a_round_that_began_is_whole(monkeypatch):
    now = iter([0.0, 0.0, 5.0, 10.0])  # the start, then the begin of each round
    monkeypatch.setattr(pairs, "perf_counter", lambda: next(now))
    assert list(turns("ab", 9, seconds=7.0)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]


def test_ratios_are_of_pairs_and_not_of_medians():
    over, under = [1.0, 9.0, 4.0], [1.0, 3.0, 8.0]
    assert ratio(over, under) == (1.0, 0.5, 3.0)  # the medians 4 and 3 would give 1.33
    assert ratio([3.0, 1.0], [1.0, 1.0]).median == 2.0


@pytest.mark.parametrize(("over", "under"), [([1.0], []), ([], [])])
def test_a_ratio_needs_pairs(over, under):
    with pytest.raises(ValueError):
        ratio(over, under)
