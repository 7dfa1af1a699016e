"""What this machine is, and the fastest that it can read memory."""

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores(),
        "blas": blas(),
        "mlx": mx.__version__,  # type: ignore[attr-defined]
        "system": f"{platform.system()} {platform.machine()}",
    }


def cores() -> int:
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


def measure_read(rounds: int = 30, num_bytes: int = READ_BYTES) -> dict[str, float]:
    """Best GB/s of several reads, by number of threads: one, and one for each core."""
    rates = {}
    for num_threads in sorted({1, cores()}):
        reader = MemoryReader(num_threads, num_bytes)
        rates[str(num_threads)] = round(max(_rate(reader) for _ in range(rounds)), 1)
    return rates


def _rate(reader: MemoryReader) -> float:
    start = time.perf_counter()
    reader.read()
    return reader.gb_s(time.perf_counter() - start)
