"""Timing the ways to compute a case of attention, in turns with a read of memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from bench.attention_cases import Case, Inputs
from bench.machine import GB, MemoryReader

READ = "read"

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
"""How far, of the largest value, the paged op may be from MLX's attention, which in half precision
rounds its scores: far less than what a wrong key would change."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds that passed, and those that processors worked: all threads, waits that spin, too."""

    wall_s: float
    cpu_s: float

    @classmethod
    def of(cls, run: Callable[[], None]) -> "Sample":
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        return cls(time.perf_counter() - wall, time.process_time() - cpu)


def time_case(
    case: Case, reader: MemoryReader, rounds: int, budget_s: float, with_torch: bool
) -> dict[str, Any]:
    """Medians over rounds in which every way has a turn, and so has a read of memory.

    Args:
        rounds: at most.
        budget_s: no round begins after so many seconds; a case that needs more for its first,
            otherwise untimed, is timed by that.

    Returns:
        The case and, by way, medians over the rounds: "ms" (wall), "cpu_ms" (processor time of all
        threads), "gb_s" (live K/V once), "percent_of_read" (of the same round), "gflop_s",
        "speedup" (of the paged op over it, in the same round); "best_..." are of the fastest
        round: other processes only ever add time.

    Raises:
        ArithmeticError: the paged op's answer is not that of MLX's attention.
    """
    inputs = Inputs(case)
    contenders = inputs.contenders()
    error = _difference(contenders["paged"](0), contenders["contiguous"](0))
    if not error <= TOLERANCE[case.dtype]:
        raise ArithmeticError(f"{case}: the paged op is {error:.2g} from MLX's attention")
    if with_torch:
        contenders |= inputs.torch_contenders()

    def over_layers(attend: Callable[[int], Any]) -> Callable[[], None]:
        def run() -> None:
            for layer in range(case.num_layers):
                attend(layer)

        return run

    runs = {READ: reader.read} | {name: over_layers(c) for name, c in contenders.items()}
    samples = in_turns(runs, rounds, budget_s)
    return summary(case, samples, reader) | {"error": float(f"{error:.2g}")}


def in_turns(
    runs: dict[str, Callable[[], None]], rounds: int, budget_s: float
) -> dict[str, list[Sample]]:
    """What each took, round by round, after one that only counts if there is no time for more."""
    started = time.perf_counter()
    first = {name: [Sample.of(run)] for name, run in runs.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    for _ in range(rounds):
        if time.perf_counter() - started > budget_s:
            break
        for name, run in runs.items():
            samples[name].append(Sample.of(run))
    return samples if samples[READ] else first


def summary(case: Case, samples: dict[str, list[Sample]], reader: MemoryReader) -> dict[str, Any]:
    """A case's times in the units of the report."""
    read_gb_s = np.array([reader.gb_s(sample.wall_s) for sample in samples[READ]])
    seconds = {
        name: np.array([sample.wall_s for sample in taken]) / case.num_layers
        for name, taken in samples.items()
        if name != READ
    }

    def of_way(name: str) -> dict[str, float]:
        wall_s = seconds[name]
        gb_s, gflop_s = case.kv_bytes / wall_s / GB, case.flops / wall_s / 1e9
        cpu_s = median(sample.cpu_s for sample in samples[name]) / case.num_layers
        values = {
            "ms": 1e3 * np.median(wall_s),
            "best_ms": 1e3 * wall_s.min(),
            "cpu_ms": 1e3 * cpu_s,
            "gb_s": np.median(gb_s),
            "best_gb_s": gb_s.max(),
            "percent_of_read": 100 * np.median(gb_s / read_gb_s),
            "gflop_s": np.median(gflop_s),
            "best_gflop_s": gflop_s.max(),
            "speedup": np.median(wall_s / seconds["paged"]),
            "best_speedup": wall_s.min() / seconds["paged"].min(),
        }
        return {key: _rounded(value) for key, value in values.items()}

    return case.as_dict() | {
        "kv_mib": _rounded(case.kv_bytes / 2**20),
        "layers": case.num_layers,
        "rounds": len(read_gb_s),
        "read_gb_s": _rounded(np.median(read_gb_s)),
        "best_read_gb_s": _rounded(read_gb_s.max()),
        "ways": {name: of_way(name) for name in seconds},
    }


def _difference(a: mx.array, b: mx.array) -> float:
    """Largest difference, of the largest value of `b`."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.abs(a - b).max() / mx.abs(b).max())


def _rounded(value: Any) -> float:
    return float(f"{value:.4g}")
