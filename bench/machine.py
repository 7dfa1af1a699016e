"""What this machine is, and how fast it reads memory and multiplies matrices."""

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from bench.flags.clock import Clock
from mlx_paged.doctor.speed import GB, MemoryReader
from mlx_paged.ops.cpu_layers import CPULayers

READ_BYTES = 128 * 2**20  # far more than any last-level cache holds
GEMM_SIZE = 512
SLOW_GFLOPS = 20.0  # A reference BLAS reaches about 4 on one core, an optimised one 50 or more


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
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def blas() -> str:
    """The library that multiplies MLX's float32 matrices on the CPU, if it can be found out."""
    if platform.system() == "Darwin":
        return "Accelerate"
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return "unknown"
    libraries = {Path(line.split()[-1]) for line in mapped.splitlines() if "blas" in line}
    preloaded = [p.name for p in libraries if not p.parent.name.endswith(".libs")]
    return ", ".join(sorted(preloaded)) or "the reference BLAS of MLX's wheel"


def measure_read(
    clock: Clock = Clock.WALL, rounds: int = 30, num_bytes: int = READ_BYTES
) -> dict[str, float]:
    """Best GB/s of several reads, by number of threads: one, and one for each core."""
    rates = {}
    for num_threads in sorted({1, cores()}):
        reader = MemoryReader(num_threads, num_bytes)
        best = min(clock.seconds(reader.read, num_threads) for _ in range(rounds))
        rates[str(num_threads)] = round(num_bytes / best / GB, 1)
    return rates


def gemm_gflops(clock: Clock = Clock.WALL, repeats: int = 3) -> float:
    """Best GFLOP/s of several products of square float32 matrices."""
    a, b = mx.random.normal((2, GEMM_SIZE, GEMM_SIZE))
    mx.eval(a, b)
    best = min(clock.seconds(lambda: mx.eval(a @ b), cores()) for _ in range(repeats))
    return round(2 * GEMM_SIZE**3 / best / 1e9, 1)


def linear_gflops(dtype: mx.Dtype, repeats: int = 5) -> float:
    """Best GFLOP/s of a linear layer, by MLX or on a CPU by mlx_paged's own kernel, whichever is
    faster here."""
    layer = nn.Linear(GEMM_SIZE, GEMM_SIZE, bias=False)
    layer.set_dtype(dtype)
    x = mx.random.normal((GEMM_SIZE, GEMM_SIZE)).astype(dtype)
    mx.eval(layer, x)
    times = []
    for _ in range(repeats):
        for context in (nullcontext(), CPULayers(layer).diverted()):
            with context:
                times.append(Clock.WALL.seconds(lambda: mx.eval(layer(x)), cores()))
    return round(2 * GEMM_SIZE**3 / min(times) / 1e9, 1)


def check_machine() -> dict[str, float]:
    """Measure the machine; warn on stderr about what makes times say little.

    Returns:
        "gemm_gflops", of float32, and "load_average", of the last minute.
    """
    machine = {"gemm_gflops": gemm_gflops(), "load_average": round(os.getloadavg()[0], 2)}
    for line in machine_warnings(machine):
        print(line, file=sys.stderr)
    return machine


def machine_warnings(machine: Mapping[str, Any]) -> Iterator[str]:
    """What makes times say little, of what :func:`check_machine` returned."""
    if (gflops := machine["gemm_gflops"]) < SLOW_GFLOPS:
        yield (
            f"slow BLAS: float32 GEMM at {gflops:.1f} GFLOP/s; on Linux preload OpenBLAS"
            " (LD_PRELOAD=.../libopenblas.so.0)"
        )
    num_cores = os.cpu_count() or 1
    if (load := machine["load_average"]) > num_cores / 2:
        yield (
            f"busy machine: load average {load:.1f} on {num_cores} cores; other processes make"
            " times longer"
        )


def machine_text(machine: dict[str, float]) -> str:
    """What :func:`check_machine` returned, for the first line of a bench."""
    return (
        f"float32 GEMM: {machine['gemm_gflops']:.0f} GFLOP/s;"
        f" load average {machine['load_average']:.1f}"
    )
