"""The preset short-behind-long: times to first token with the long prompts and without them."""

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from bench.flags.presets import LONG, SHORT
from bench.serving.measures import ttfts_ms
from bench.serving.run import Run
from bench.serving.trace import Trace

Runs = Mapping[str, Sequence[Run]]
"""Of each engine, one a round."""


def without_long(trace: Trace) -> Trace:
    """The same requests but for the long prompts."""
    return tuple(job for job in trace if len(job.prompt) != LONG[1])


def compare(beside: Runs, alone: Runs) -> dict[str, dict[str, float]]:
    """By engine, from runs of the preset and of its trace without the long prompts: p95 in
    milliseconds, medians of rounds."""

    def p95(runs: Sequence[Run], which: slice) -> float:
        return float(median(np.percentile(ttfts_ms(run.streams[which]), 95) for run in runs))

    found, short = {}, slice(-SHORT[0], None)
    for name, runs in beside.items():
        row = {"short_ms": p95(runs, short), "short_alone_ms": p95(alone[name], short)}
        row["ratio"] = row["short_ms"] / row["short_alone_ms"]
        row["long_ms"] = p95(runs, slice(-SHORT[0] - LONG[0], -SHORT[0]))
        found[name] = {key: round(value, 3) for key, value in row.items()}
    return found


LINE = (
    "{}: p95 TTFT of short prompts {short_ms:.0f} ms, without long ones {short_alone_ms:.0f} ms:"
    " {ratio:.2f}x; of long ones {long_ms:.0f} ms"
)
