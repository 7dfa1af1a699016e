"""Times linear layers of few rows on a CPU beside MLX's own and, with --ggml, llama.cpp's.

    python -m scripts.cpu_linear [--ggml DIR] [--formats 4 bfloat16] [--rows 1 16]

All take turns in one process, with as many threads as there are processors. A turn begins with
runs that are not timed, until no thread of the one before spins and the processor is at its speed.
A round computes the products with many different matrices, so that weights come from memory, and
reads as many bytes. Graphs are built before. DIR has libggml-base.so and libggml-cpu.so.
"MLX over ours" and "llama.cpp over ours" compare times: more is better. "% of read" is the rate at
which ours reads weights over the rate of a plain read beside it. The last line is one JSON object.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from bench.command import print_result, table
from bench.machine import check_machine, cores, machine_text
from bench.pairs import in_turns, ratio
from mlx_paged.doctor.speed import MemoryReader
from mlx_paged.ops.cpu_layers import CPULayers

FORMATS = ("float32", "bfloat16", "float16", "4", "8")
GGML_TYPES = {"float32": 0, "float16": 1, "4": 2, "8": 8, "bfloat16": 30}
GGML_BLOCK = {2: (32, 18), 8: (32, 34), 0: (1, 4), 1: (1, 2), 30: (1, 2)}  # elements, bytes
MEGABYTES = 120  # of weights in a round: more than a cache holds
MOST = 48  # matrices of a round
WARM_SECONDS = 0.1  # threads of OpenBLAS and OpenMP spin for up to 30 ms after their work


class _GgmlParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class Ggml:
    """Products of random weights in one graph of llama.cpp's library, in the layout it prefers."""

    def __init__(self, folder: Path, kind: str, count: int, depth: int, width: int, rows: int):
        base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))

        def call(library: ctypes.CDLL, name: str, *args: Any) -> Any:
            function = getattr(library, name)
            function.restype = ctypes.c_void_p
            return function(*args)

        def pointer(value: int | None) -> ctypes.c_void_p:
            return ctypes.c_void_p(value)

        def context() -> ctypes.c_void_p:
            return pointer(call(base, "ggml_init", _GgmlParams(64 << 20, None, True)))

        def matrix(where: ctypes.c_void_p, number: int, lines: int) -> ctypes.c_void_p:
            sizes = ctypes.c_int64(depth), ctypes.c_int64(lines)
            return pointer(call(base, "ggml_new_tensor_2d", where, number, *sizes))

        number = GGML_TYPES[kind]
        elements, size = GGML_BLOCK[number]
        stored, computed = context(), context()
        weights = [matrix(stored, number, width) for _ in range(count)]
        if kind == "4":  # as llama.cpp stores q4_0
            layout = pointer(call(cpu, "_Z35ggml_backend_cpu_repack_buffer_typev"))
        else:
            layout = pointer(call(base, "ggml_backend_cpu_buffer_type"))
        assert call(base, "ggml_backend_alloc_ctx_tensors_from_buft", stored, layout)
        blocks = np.random.default_rng(0).integers(0, 60, depth * width // elements * size)
        data = blocks.astype(np.uint8).tobytes()
        for each in weights:
            call(base, "ggml_backend_tensor_set", each, data, ctypes.c_size_t(0), len(data))
        x = matrix(computed, 0, rows)
        self._graph = pointer(call(base, "ggml_new_graph", computed))
        for each in weights:
            product = pointer(call(base, "ggml_mul_mat", computed, each, x))
            call(base, "ggml_build_forward_expand", self._graph, product)
        self._backend = pointer(call(cpu, "ggml_backend_cpu_init"))
        call(cpu, "ggml_backend_cpu_set_n_threads", self._backend, cores())
        assert call(base, "ggml_backend_alloc_ctx_tensors", computed, self._backend)
        values = np.random.default_rng(1).standard_normal((rows, depth)).astype(np.float32)
        values_of = values.tobytes(), ctypes.c_size_t(0), ctypes.c_size_t(values.nbytes)
        call(base, "ggml_backend_tensor_set", x, *values_of)
        self._compute = base.ggml_backend_graph_compute

    def run(self) -> None:
        assert self._compute(self._backend, self._graph) == 0


def layer(kind: str, depth: int, width: int) -> nn.Module:
    """A layer without a bias, of random weights."""
    made: nn.Module = nn.Linear(depth, width, bias=False)
    made.set_dtype(getattr(mx, kind, mx.bfloat16))
    return made.to_quantized(64, int(kind)) if kind.isdigit() else made


def seconds(prepare: Callable[[], Callable[[], object]]) -> float:
    warm = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < warm:
        prepare()()
    run = prepare()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def compare(kind: str, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of some rounds, of one product each."""
    depth, width = args.shape
    made = layer(kind, depth, width)
    mx.eval(made.parameters())
    num_bytes = sum(a.nbytes for a in made.parameters().values())
    count = min(MOST, 1 + MEGABYTES * 10**6 // num_bytes)
    copies = {name: mx.stack([a] * count) for name, a in made.parameters().items()}
    layers = [copy(made).update({name: a[i] for name, a in copies.items()}) for i in range(count)]
    x = mx.random.normal((rows, depth)).astype(made["scales" if kind.isdigit() else "weight"].dtype)
    mx.eval(x, [each.parameters() for each in layers])
    diverted = CPULayers(made, True)

    def graph(of: list[nn.Module]) -> Callable[[], None]:
        return partial(mx.eval, [each(x) for each in of])

    def ours() -> Callable[[], None]:
        with diverted.diverted():
            return graph(layers)

    few = layers if kind == "float32" else layers[:1]  # where MLX takes much longer
    runs: dict[str, tuple[Callable[[], Callable[[], object]], int]] = {
        "ours": (ours, count),
        "MLX": (lambda: graph(few), len(few)),
    }
    if args.ggml is not None:
        other = Ggml(args.ggml, kind, count, depth, width, rows)
        runs["llama.cpp"] = lambda: other.run, count
    reader = MemoryReader(cores(), 10**6 * MEGABYTES)
    courses = {name: partial(seconds, prepare) for name, (prepare, _) in runs.items()}
    times = in_turns({"read": lambda: seconds(lambda: reader.read)} | courses, args.rounds)
    read_gb_s = [10**6 * MEGABYTES / each / 1e9 for each in times["read"]]
    ms = {name: [1000 * each / runs[name][1] for each in times[name]] for name in runs}
    result: dict[str, Any] = {"weights": kind, "rows": rows}
    result |= {f"{name} ms": round(median(ms[name]), 3) for name in runs}
    for name in [*runs][1:]:
        result[f"{name} over ours"] = round(ratio(ms[name], ms["ours"]).median, 2)
    ours_gb_s = [num_bytes / 1e6 / each for each in ms["ours"]]
    return result | {
        "read GB/s": round(median(read_gb_s), 1),
        "% of read": round(100 * ratio(ours_gb_s, read_gb_s).median),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts.cpu_linear", description=__doc__)
    parser.add_argument("--ggml", type=Path, metavar="DIR")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32])
    parser.add_argument("--shape", nargs=2, type=int, default=[768, 3072], metavar=("D", "O"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    machine = check_machine()
    found = [compare(kind, rows, args) for kind in args.formats for rows in args.rows]
    print(machine_text(machine))
    print(table([[*found[0]], *[[str(value) for value in each.values()] for each in found]]))
    print_result("cpu_linear", {**machine, "shape": args.shape, "results": found})


if __name__ == "__main__":
    main()
