"""What it gains that sequences which begin with the same blocks attend to these together.

Two measurements, each in turns with and without: the op on one new token of each sequence, and an
engine that serves agents with one system prompt, then samples of one prompt.

    python -m bench.shared_prefixes --heads 32:8:128 --dtypes bfloat16 --only op
    python -m bench.shared_prefixes --model smollm2-bfloat16 --only served
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from bench.command import GIB, print_result, table
from bench.flags.clock import Clock
from bench.flags.head_counts import HeadCounts
from bench.flags.shared_prefixes import BLOCK_SIZE, SAMPLED_TOKENS, Batch, parse
from bench.machine import check_machine, machine_text, measure_read
from bench.models import named_model, random_prompts
from bench.pairs import in_turns, ratio
from mlx_paged import Engine, SamplingParams, ops
from mlx_paged.kv.blocks import ceil_div
from mlx_paged.kv.memory import default_kv_memory

OWN_TOKENS = 40, 200  # of an agent's prompt: at least and fewer than


def measured(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, round by round, after a round that is not counted."""
    courses = {name: partial(Clock.WALL.seconds, run, 1) for name, run in ways.items()}
    return in_turns(courses, rounds, warm_up=1)


def gain(seconds: dict[str, list[float]]) -> float:
    """How many times as long "alone" took as "together": the median of the rounds' ratios."""
    return ratio(seconds["alone"], seconds["together"]).median


def attention(batch: Batch, heads: HeadCounts, dtype: str) -> dict[str, Callable[[], object]]:
    """The op on random K/V, with each sequence alone and with all of them together."""
    rng = np.random.default_rng(0)
    shared, own = batch.shared // BLOCK_SIZE, ceil_div(batch.shared % BLOCK_SIZE + batch.own, 16)
    num_blocks = shared + batch.sequences * own

    def random(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, np.float32)).astype(getattr(mx, dtype))

    shape = num_blocks, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim  # as a pool has it in memory
    k, v = (random(*shape).transpose(1, 0, 2, 3) for _ in "kv")
    q = random(batch.sequences, heads.num_heads, 1, heads.head_dim)
    ids = rng.permutation(num_blocks).astype(np.int32)
    prefix = np.tile(ids[:shared], (batch.sequences, 1))
    tables = mx.array(np.hstack([prefix, ids[shared:].reshape(batch.sequences, own)]))
    lengths = mx.full((batch.sequences,), batch.shared + batch.own, mx.int32)
    common = np.full(batch.sequences, shared * BLOCK_SIZE)
    common[0] = 0
    prefixes = mx.array(np.stack([np.arange(batch.sequences), common]).astype(np.int32))
    arrays = q, [k], [v], tables, lengths
    mx.eval(q, k, v, tables, lengths, prefixes)
    alone, together = (ops.paged_attention(*arrays, shared_prefixes=p)[0] for p in (None, prefixes))
    if not mx.array_equal(alone, together):
        raise ArithmeticError(f"{batch} {heads} {dtype}: other bits together than alone")
    return {
        "alone": lambda: mx.eval(ops.paged_attention(*arrays)[0]),
        "together": lambda: mx.eval(ops.paged_attention(*arrays, shared_prefixes=prefixes)[0]),
    }


def least_seconds(
    batch: Batch, heads: HeadCounts, dtype: str, read_gb_s: float, gflops: float
) -> float:
    """One read of all keys and values, or all products at the rate of float32 matrices, whichever
    takes longer."""
    rows = batch.shared + batch.sequences * batch.own
    size = getattr(mx, dtype).size
    num_bytes = 2 * rows * heads.num_kv_heads * heads.head_dim * size
    keys = batch.sequences * (batch.shared + batch.own)
    products = 4 * keys * heads.num_heads * heads.head_dim
    return float(max(num_bytes / (read_gb_s * GIB), products / (gflops * 1e9)))


def measure_op(args: argparse.Namespace, machine: dict[str, float]) -> list[dict[str, Any]]:
    read_gb_s = max(measure_read().values())
    rows = []
    for heads, dtype, batch in product(args.heads, args.dtypes, args.batches):
        seconds = measured(attention(batch, heads, dtype), args.rounds)
        least = least_seconds(batch, heads, dtype, read_gb_s, machine["gemm_gflops"])
        row = {"heads": str(heads), "dtype": dtype, "batch": str(batch)}
        row |= {f"{name}_ms": round(1000 * median(times), 3) for name, times in seconds.items()}
        row |= {"least_ms": round(1000 * least, 3), "gain": round(gain(seconds), 2)}
        rows.append(row)
    return rows


def measure_served(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Agents with one system prompt, which is in the prefix cache; then samples of a prompt."""
    model, rng = named_model(args.model), np.random.default_rng(1)
    (system,) = random_prompts(1, args.shared_tokens, args.model)
    own = [int(rng.integers(*OWN_TOKENS)) for _ in range(args.agents)]
    tails = iter(range(1, 10**6))  # other tails in each round: only the system prompt is known
    sampling = SamplingParams(max_tokens=args.max_tokens)
    samples = SamplingParams(max_tokens=args.max_tokens, temperature=1.0, seed=1)

    def agents(engine: Engine) -> None:
        seed = next(tails)
        prompts = [
            system + random_prompts(1, length, args.model, seed * args.agents + i)[0]
            for i, length in enumerate(own)
        ]
        engine.generate(prompts, sampling)

    def sampled(engine: Engine) -> None:
        (prompt,) = random_prompts(1, SAMPLED_TOKENS, args.model, next(tails))
        engine.add_samples(prompt, args.samples, samples)
        while engine.has_work:
            engine.step()

    rows = []
    widest, pool = max(args.agents, args.samples), default_kv_memory()
    for name, count, serve in (("agents", args.agents, agents), ("samples", args.samples, sampled)):
        engines = {
            way: Engine(model, cascade=way == "together", max_running=widest, kv_memory=pool)
            for way in ("alone", "together")
        }
        seconds = measured({way: partial(serve, e) for way, e in engines.items()}, args.rounds)
        rate = {
            f"{way}_tokens_s": round(count * args.max_tokens / median(times), 1)
            for way, times in seconds.items()
        }
        shared = {way: engine.stats.shared_keys for way, engine in engines.items()}
        assert shared["together"] > shared["alone"] == 0
        rows.append({"served": f"{count} {name}", **rate, "gain": round(gain(seconds), 2)})
    return rows


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    machine = check_machine()
    print(f"Rounds: {args.rounds}; {machine_text(machine)}.")
    result: dict[str, Any] = {"model": args.model, "rounds": args.rounds, **machine}
    if args.only != "served":
        result["op"] = measure_op(args, machine)
        print_rows(result["op"])
    if args.only != "op":
        result["served"] = measure_served(args)
        print_rows(result["served"])
    print_result("shared_prefixes", result)


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(table([list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]))


if __name__ == "__main__":
    main()
