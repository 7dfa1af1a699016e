"""Timing the ways to compute a case of attention, in turns with a read of memory."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from bench import pairs
from bench.flags.clock import Clock
from bench.machine import cores
from bench.paged_attention.cases import Case, Inputs
from mlx_paged.doctor.speed import GB, MemoryReader

READ = "read"
TURN_S = 0.05

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
"""Largest difference from MLX's attention, as a part of the largest value. MLX rounds its scores in
half precision. A wrong key would change far more."""


def time_case(case: Case, reader: MemoryReader, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds in which every way and a read of memory have a turn.

    Returns:
        The case and, by way, medians over the rounds: "ms", "gb_s" (live K/V once),
        "percent_of_read" (of the same round), "gflop_s", "speedup" (of the paged op over this way,
        in the same round). "best_..." are of the fastest round: other processes only add time.

    Raises:
        ArithmeticError: the paged op's answer is not that of MLX's attention.
    """
    inputs = Inputs(case)
    contenders = inputs.contenders()
    error = _difference(contenders["paged"](0), contenders["contiguous"](0))
    if not error <= TOLERANCE[case.dtype]:
        raise ArithmeticError(f"{case}: the paged op is {error:.2g} from MLX's attention")
    if args.torch:
        contenders |= inputs.torch_contenders()
    if args.ggml:
        contenders |= inputs.ggml_contenders()

    def over_layers(attend: Callable[[int], Any]) -> Callable[[], None]:
        def run() -> None:  # launched one after the other and waited for once, as in a step
            results = [attend(layer) for layer in range(case.num_layers)]
            mx.eval([result for result in results if isinstance(result, mx.array)])

        return run

    reader.read()  # wakes its threads
    runs = {READ: reader.read} | {name: over_layers(c) for name, c in contenders.items()}
    times = in_turns(runs, args.rounds, args.case_seconds, args.clock)
    return summary(case, times, reader) | {"error": float(f"{error:.2g}")}


def in_turns(
    runs: dict[str, Callable[[], None]], rounds: int, budget_s: float, clock: Clock
) -> dict[str, list[float]]:
    """Seconds of each run, round by round; no round begins after `budget_s`.

    The first round is a warm-up. It counts only if there is no time for another one. From then on
    fast runs are repeated for `TURN_S`: what ran before, as a read of memory, slows their start.
    """
    started = time.perf_counter()
    once = {name: partial(clock.seconds, run, cores()) for name, run in runs.items()}
    first = pairs.in_turns(once, 1)

    def turn_of(name: str) -> float:
        repeats = max(1, int(TURN_S / first[name][0]))
        return clock.seconds(lambda: [runs[name]() for _ in range(repeats)], cores()) / repeats

    left = budget_s - (time.perf_counter() - started)
    courses = {name: partial(turn_of, name) for name in runs}
    times = pairs.in_turns(courses, rounds, seconds=left)
    return times if times[READ] else first


def summary(case: Case, times: dict[str, list[float]], reader: MemoryReader) -> dict[str, Any]:
    """A case's times in the units of the report."""
    read_gb_s = reader.num_bytes / np.array(times[READ]) / GB
    by_way = {
        name: np.array(taken) / case.num_layers for name, taken in times.items() if name != READ
    }

    def of_way(name: str) -> dict[str, float]:
        seconds = by_way[name]
        gb_s, gflop_s = case.kv_bytes / seconds / GB, case.flops / seconds / 1e9
        values = {
            "ms": 1e3 * np.median(seconds),
            "best_ms": 1e3 * seconds.min(),
            "gb_s": np.median(gb_s),
            "best_gb_s": gb_s.max(),
            "percent_of_read": 100 * np.median(gb_s / read_gb_s),
            "gflop_s": np.median(gflop_s),
            "best_gflop_s": gflop_s.max(),
            "speedup": np.median(seconds / by_way["paged"]),
            "best_speedup": seconds.min() / by_way["paged"].min(),
        }
        return {key: _rounded(value) for key, value in values.items()}

    return case.as_dict() | {
        "kv_mib": _rounded(case.kv_bytes / 2**20),
        "layers": case.num_layers,
        "rounds": len(read_gb_s),
        "read_gb_s": _rounded(np.median(read_gb_s)),
        "best_read_gb_s": _rounded(read_gb_s.max()),
        "ways": {name: of_way(name) for name in by_way},
    }


def _difference(a: mx.array, b: mx.array) -> float:
    """Largest difference, as a part of the largest value of `b`."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.abs(a - b).max() / mx.abs(b).max())


def _rounded(value: Any) -> float:
    return float(f"{value:.4g}")
