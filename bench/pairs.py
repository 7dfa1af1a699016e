"""Courses that take turns in one process, and the ratios of what they take in the same round.

Other processes slow neighbouring turns about equally, so that a ratio of one round says more than a
ratio of two medians.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from statistics import median
from time import perf_counter
from typing import NamedTuple, TypeVar

from tqdm import tqdm

Name = TypeVar("Name")
Value = TypeVar("Value")


def turns(
    courses: Iterable[Name], rounds: int, *, title: str | None = None, seconds: float = inf
) -> Iterator[tuple[int, Name]]:
    """The number of a round and a course, for all courses in every round.

    Each round begins with another course.

    Args:
        title: of a bar on stderr that shows the rounds; None: no bar.
        seconds: after so many seconds no round begins.
    """
    order = list(courses)
    ends = perf_counter() + seconds
    for i in tqdm(range(rounds), desc=title, unit="round", disable=True if title is None else None):
        if perf_counter() >= ends:
            return
        first = i % len(order)
        for course in [*order[first:], *order[:first]]:
            yield i, course


def in_turns(
    courses: Mapping[str, Callable[[], Value]],
    rounds: int,
    *,
    warm_up: int = 0,
    title: str | None = None,
    seconds: float = inf,
) -> dict[str, list[Value]]:
    """What each course returns, round by round.

    Args:
        warm_up: how many rounds come before these and are not counted.
        title, seconds: as in :func:`turns`.
    """
    values: dict[str, list[Value]] = {name: [] for name in courses}
    for i, name in turns(courses, warm_up + rounds, title=title, seconds=seconds):
        value = courses[name]()
        if i >= warm_up:
            values[name].append(value)
    return values


class Ratio(NamedTuple):
    """Ratios of pairs."""

    median: float
    lowest: float
    highest: float


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """The ratios ``over[i] / under[i]``; ValueError if the lengths differ or are 0."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    if not ratios:
        raise ValueError("ratio: no pair: expected at least one round")
    return Ratio(median(ratios), min(ratios), max(ratios))
