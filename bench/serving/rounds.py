"""Several rounds of each engine in one: medians, and ratios of what ran side by side."""

from collections.abc import Sequence
from statistics import median, median_low
from typing import Any

from bench.serving.measures import Summary

RATIOS = (
    "output_tokens_per_sec",
    "continuous_steady_tokens_per_sec",
    "kv_held_peak_mib",
    "peak_mlx_mib",
)


def merge(rounds: Sequence[Any]) -> Any:
    """Median of each number, key by key, the lower one of counts; else the first round's value."""
    first = rounds[0]
    if isinstance(first, dict):
        return {key: merge([each[key] for each in rounds]) for key in first}
    if all(isinstance(each, int) for each in rounds):
        return median_low(rounds)
    if all(isinstance(each, int | float) for each in rounds):
        return median(rounds)
    return first


def ratios(by_engine: dict[str, list[Summary]]) -> dict[str, dict[str, float]]:
    """The first engine over each other one in the same round: the median of rounds."""
    first, *others = by_engine
    found: dict[str, dict[str, float]] = {}
    for other in others:
        pairs = list(zip(by_engine[first], by_engine[other], strict=False))
        found[f"{first} / {other}"] = {
            key: round(median(a[key] / b[key] for a, b in pairs), 3)
            for key in RATIOS
            if pairs and all(a[key] and b[key] for a, b in pairs)
        }
    return found
