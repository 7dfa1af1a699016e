"""How fast decodes read K/V, beside MLX's own attention and a plain read; the host's time."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.doctor.buffers import compare_buffers
from mlx_paged.doctor.findings import Findings
from mlx_paged.engine.engine import Engine
from mlx_paged.kv.pool import KVPool, as_int32
from mlx_paged.kv.shapes import KVShape
from mlx_paged.loading import load_model
from mlx_paged.metrics.tick import PARTS

GB = 1e9
FULL_BYTES, FEW_BYTES = 128 * 2**20, 32 * 2**20
"""K/V of all layers together. Layers take turns, so that no cache of the processor holds it. MLX's
attention is slow on a CPU, so that a CPU reads the few bytes."""

BLOCK_SIZE = 16
SHAPE = KVShape(8, 128, 128, mx.float16)
NUM_HEADS = 32
MOST_SECONDS = 3  # of one shape; MLX's attention takes long on a CPU, with fewer rounds then
NUM_ROWS = 16  # requests that decode while the host's time is measured


def check_speed(found: Findings, quick: bool) -> None:
    """decode bandwidth and the host's time"""
    cases = [(4, 2048)] if quick else [(1, 8192), (8, 2048), (32, 512)]
    on_cpu, rounds = mx.default_device() == mx.Device(mx.cpu), 3 if quick else 7
    head = f"GB/s of K/V, medians of up to {rounds} rounds in turns; {NUM_HEADS} query heads,"
    found.lines.append(f"{head} {SHAPE.n_kv_heads} KV heads of {SHAPE.head_dim}, float16")
    for batch, context in found.progress(cases, "shape"):
        rates = decode_rates(batch, context, FEW_BYTES if on_cpu else FULL_BYTES, rounds)
        name = f"{batch} x {context} tokens"
        found.numbers[name] = rates
        text = ", ".join(f"{way} {rate:.3g}" for way, rate in rates.items())
        share = 100 * rates["mlx_paged"] / rates["read"]
        found.lines.append(f"{name}: {text}; mlx_paged is at {share:.0f} % of the read")
    parts = host_parts(20 if quick else 60)
    first, buffers = parts.pop("first_start_s"), parts.pop("command_buffers")
    found.numbers |= {"first_start_s": first, "command_buffers_a_step": buffers}
    found.verdict = f"decode at {share:.0f} % of a read, step {parts['tick_ms']:.2f} ms"
    if not on_cpu:
        found.verdict += f" with {buffers:.1f} command buffers"
        found.lines.append(f"{found.verdict}; first start: {first:.1f} s")
        compare_buffers(found, quick)
    found.numbers["step_ms"] = parts
    text = ", ".join(f"{name.removesuffix('_ms')} {ms:.2f}" for name, ms in parts.items())
    found.lines.append(f"a decode step of {NUM_ROWS} requests, demo model, in ms: {text}")
    check_compiled(found, 20 if quick else 60)
    if on_cpu:
        found.lines.append("on a CPU most of the launch is the model's computation")


def decode_rates(batch: int, context: int, most_bytes: int, rounds: int) -> dict[str, float]:
    """GB/s by way, for one token of `batch` sequences with `context` tokens each: a plain read of
    as many bytes, MLX's attention on contiguous K/V, the paged op on blocks in random order."""
    num_blocks, layer_bytes = batch * context // BLOCK_SIZE, batch * context * SHAPE.token_bytes
    num_layers = max(1, most_bytes // layer_bytes)
    order = np.random.default_rng(0).permutation(num_blocks).reshape(batch, -1)
    tables, lens = as_int32(order.astype(np.int32)), as_int32([context] * batch)
    pool = KVPool([SHAPE] * num_layers, num_blocks, BLOCK_SIZE)
    slots = as_int32(range(num_blocks * BLOCK_SIZE))
    rows = mx.random.normal((slots.size, SHAPE.n_kv_heads, SHAPE.head_dim)).astype(SHAPE.dtype)
    for layer in range(num_layers):
        pool.write(layer, rows, rows, slots)
    contiguous = [
        [mx.contiguous(ops.gather_blocks(cache, tables, context)) for cache in layer]
        for layer in zip(pool.k, pool.v, strict=True)
    ]
    q = mx.random.normal((batch, NUM_HEADS, 1, SHAPE.head_dim)).astype(SHAPE.dtype)
    mx.eval(q, tables, lens, contiguous, pool.handles())
    paged = q, pool.k, pool.v, tables, lens
    attend, scale = mx.fast.scaled_dot_product_attention, SHAPE.head_dim**-0.5
    num_bytes = num_layers * layer_bytes
    reader = MemoryReader(os.cpu_count() or 1, num_bytes)
    ways: dict[str, Callable[[], None]] = {
        "read": reader.read,
        "MLX contiguous": lambda: mx.eval([attend(q, k, v, scale=scale) for k, v in contiguous]),
        "mlx_paged": lambda: mx.eval([ops.paged_attention(*paged, i) for i in range(num_layers)]),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    begun = time.perf_counter()
    while len(times["read"]) <= rounds:
        if len(times["read"]) > 1 and time.perf_counter() - begun > MOST_SECONDS:
            break
        for way, run in ways.items():
            started = time.perf_counter()
            run()
            times[way].append(time.perf_counter() - started)
    return {way: num_bytes / median(taken[1:]) / GB for way, taken in times.items()}


def check_compiled(found: Findings, num_steps: int) -> None:
    """Time steps of one request with compiled decodes and without, and say what an engine chooses
    where the caller leaves the choice to it."""
    model, _ = load_model()
    ways = {"plain": False, "compiled": True, "chosen": None}
    engines = {
        way: Engine(model, num_blocks=64, max_running=1, compile=compile)
        for way, compile in ways.items()
    }
    chosen = "plain" if calls_model(engines.pop("chosen"), type(model)) else "compiled"
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    for engine in engines.values():
        engine.add_request([1] * 8, max_tokens=num_steps + 8)
    for _ in range(num_steps):
        for way, engine in engines.items():
            started = time.perf_counter()
            engine.step()
            seconds[way].append(time.perf_counter() - started)
    times = {way: round(1000 * median(taken[2:]), 4) for way, taken in seconds.items()}
    found.numbers["decode_ms"] = times | {"chosen": chosen}
    text = ", ".join(f"{way} {ms:.2f}" for way, ms in times.items())
    found.lines.append(f"a decode step of one request, demo model, in ms: {text}; chosen: {chosen}")


def calls_model(engine: Engine, kind: type[Any]) -> bool:
    """Whether a decode step calls the model, which is of this class. A compiled one does not."""
    calls, call = list[object](), kind.__call__

    def noted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return call(*args, **options)

    engine.add_request([1] * 8, max_tokens=8)
    for _ in range(4):
        engine.step()
    with patch.object(kind, "__call__", noted):
        engine.step()
    return bool(calls)


def host_parts(num_steps: int) -> dict[str, float]:
    """Medians of the parts of a decode step, and of MLX's `async_eval` within its launch, in
    milliseconds; command buffers of a step; seconds to compile pipelines."""
    model, _ = load_model()
    engine = Engine(model, num_blocks=1024, max_running=NUM_ROWS)
    for first in range(NUM_ROWS):
        engine.add_request([first + 1] * 8, max_tokens=num_steps + 8)
    num_buffers, seconds = ops.metal.num_command_buffers(), list[float]()
    with patch.object(mx, "async_eval", timed(mx.async_eval, seconds)):
        while engine.has_work:
            engine.step()
    num_buffers = ops.metal.num_command_buffers() - num_buffers
    ticks = [tick for tick in engine.ticks if not tick.has_prompt_tokens and tick.decode_tokens]
    parts = "tick_ms", *PARTS
    found = {part: round(median(getattr(tick, part) for tick in ticks), 4) for part in parts}
    found["async_eval_ms"] = round(1000 * median(seconds), 4)
    found["command_buffers"] = num_buffers / engine.stats.steps
    return found | {"first_start_s": engine.stats.prewarm_seconds or 0.0}


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function, which notes how long each call takes."""

    def call(*args: Any) -> Any:
        started = time.perf_counter()
        result = function(*args)
        seconds.append(time.perf_counter() - started)
        return result

    return call


class MemoryReader:
    """Reads an array that fits no cache: with threads on a CPU, with a kernel on a GPU."""

    def __init__(self, num_threads: int, num_bytes: int = FULL_BYTES) -> None:
        self.num_bytes = num_bytes
        self.read: Callable[[], Any]
        if mx.default_device() == mx.Device(mx.cpu):
            parts = np.array_split(np.ones(num_bytes // 8, np.int64), num_threads)
            threads = ThreadPoolExecutor(num_threads)
            self.read = lambda: list(threads.map(np.bitwise_or.reduce, parts))
        else:
            array = mx.ones(num_bytes // 4, mx.int32)
            mx.eval(array)
            self.read = lambda: mx.eval(mx.max(array))
