"""What this machine is, and the fastest that it can read memory."""

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

import mlx.core as mx
import numpy as np

READ_BYTES = 128 * 2**20
"""Far beyond any last-level cache."""

GB = 1e9


def describe() -> dict[str, str | int]:
    """By name: "device" ("cpu" or "gpu"), "cpu", "cores", "blas", "mlx", "system"."""
    return {
        "device": "cpu" if mx.default_device() == mx.cpu else "gpu",
        "cpu": str(mx.device_info().get("device_name", platform.processor())),
        "cores": cores(),
        "blas": blas(),
        "mlx": mx.__version__,  # type: ignore[attr-defined]
        "system": f"{platform.system()} {platform.machine()}",
    }


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def blas() -> str:
    """The library that multiplies MLX's float32 matrices on the CPU, as far as it can be told."""
    if platform.system() == "Darwin":
        return "Accelerate"
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return "unknown"
    libraries = {Path(line.split()[-1]) for line in mapped.splitlines() if "blas" in line}
    preloaded = [p.name for p in libraries if not p.parent.name.endswith(".libs")]
    return ", ".join(sorted(preloaded)) or "the reference BLAS of MLX's wheel"


class Clock(StrEnum):
    """How seconds are counted."""

    WALL = "wall"
    PROCESSOR = "processor"

    def seconds(self, run: Callable[[], object], num_threads: int) -> float:
        """What `run` takes: the time that passes, or that processors work, an equal part for each
        of so many threads. The latter is what a busy machine would need alone, if the work was
        shared evenly: too good for work that one thread does, such as most of MLX's on a CPU.
        """
        read = time.perf_counter if self is Clock.WALL else time.process_time
        started = read()
        run()
        elapsed = read() - started
        return elapsed if self is Clock.WALL else elapsed / num_threads


class MemoryReader:
    """Reads an array that no cache holds: on a CPU with so many threads, on a GPU with a kernel."""

    def __init__(self, num_threads: int, num_bytes: int = READ_BYTES) -> None:
        self.num_bytes = num_bytes
        self.num_threads = num_threads
        self._parts = np.array_split(np.ones(num_bytes // 8, np.int64), num_threads)
        self._threads = ThreadPoolExecutor(num_threads)
        self.read: Callable[[], None] = self._read_on_cpu
        if mx.default_device() != mx.cpu:
            self._array = mx.ones(num_bytes // 4, mx.int32)
            mx.eval(self._array)
            self.read = self._read_on_gpu

    def _read_on_cpu(self) -> None:
        list(self._threads.map(np.bitwise_or.reduce, self._parts))

    def _read_on_gpu(self) -> None:
        mx.eval(mx.max(self._array))

    def gb_s(self, seconds: float) -> float:
        """GB/s of a `read` that took so long."""
        return self.num_bytes / seconds / GB


def measure_read(
    clock: Clock = Clock.WALL, rounds: int = 30, num_bytes: int = READ_BYTES
) -> dict[str, float]:
    """Best GB/s of several reads, by number of threads: one, and one for each core."""
    rates = {}
    for num_threads in sorted({1, cores()}):
        reader = MemoryReader(num_threads, num_bytes)
        best = min(clock.seconds(reader.read, num_threads) for _ in range(rounds))
        rates[str(num_threads)] = round(reader.gb_s(best), 1)
    return rates


def measure_gemm(clock: Clock = Clock.WALL, rounds: int = 20, size: int = 512) -> float:
    """Best GFLOP/s of several products of square float32 matrices."""
    a, b = mx.random.normal((2, size, size))
    mx.eval(a, b)
    best = min(clock.seconds(lambda: mx.eval(a @ b), cores()) for _ in range(rounds))
    return round(2 * size**3 / best / 1e9, 1)
