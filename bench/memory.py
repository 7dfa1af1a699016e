"""What sharing saves: blocks, copies on write and bytes of samples, beams and shared prefixes.

    python -m bench.memory --prompt-tokens 500 --n 16 --max-tokens 64
    python -m bench.memory --prompt-tokens 2000 --rounds 3

Without --rounds nothing is timed, and the same arguments print the same numbers. --rounds times the
samples, beside the same samples as separate requests and beside mlx-lm, and engine.fork. The last
line is one JSON object.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

from bench.command import (
    MIB,
    print_result,
    table,
    text_of,
)
from bench.flags.memory import parse
from bench.machine import check_machine, machine_text
from bench.models import named_model, random_prompts
from bench.pairs import in_turns
from mlx_paged import Engine
from mlx_paged.kv.blocks import ceil_div
from mlx_paged.options import KVBits, checked_bits
from mlx_paged.runner.model_probe import probe

SEED = 0
TEMPERATURE = 1.0
MLX_LM_PREFILL_STEP = 2048  # mlx-lm's own default
FORK_BATCHES = 20  # fork times are medians over so many times n children


@dataclass(frozen=True)
class Workload:
    """`n` sequences of `max_tokens` tokens each that begin with one prompt."""

    prompt: list[int]
    own_tokens: list[list[int]]  # further prompt tokens, if the prompt is only a prefix
    n: int
    max_tokens: int
    block_size: int
    kv_bits: KVBits = None

    @property
    def prompts(self) -> list[list[int]]:
        return [self.prompt + own for own in self.own_tokens]

    @property
    def longest(self) -> int:
        """K/V tokens of the longest sequence; the last token's own K/V is never needed."""
        own = max(map(len, self.own_tokens), default=0)
        return len(self.prompt) + own + self.max_tokens - 1

    @property
    def ideal_blocks(self) -> float:
        """Blocks of all samples if the prompt is stored once and no block is partly empty."""
        return (len(self.prompt) + self.n * (self.max_tokens - 1)) / self.block_size


Held = dict[str, Any]
"""The most that one workload held, and what was copied for it.

"distinct_blocks": blocks of all sequences at their end, if blocks with the same tokens after the
same tokens are one; None for beams. "copies_bytes": K/V of the same sequences if each had its own
copy, token for token. "mlx_lm_bytes": what mlx-lm's BatchGenerator held; it has no beams.
"""


def distinct_blocks(sequences: Iterable[Sequence[int]], block_size: int) -> int:
    """Blocks for all `sequences` if blocks with the same tokens after the same tokens are one."""
    blocks: set[tuple[int, ...]] = set()
    for tokens in sequences:
        blocks.update(
            tuple(tokens[: (i + 1) * block_size]) for i in range(ceil_div(len(tokens), block_size))
        )
    return len(blocks)


def make_engine(
    model: nn.Module, work: Workload, num_sequences: int, *, prefix_cache: bool = True
) -> Engine:
    """An engine that never lacks a block, even if nothing is shared."""
    return Engine(
        model,
        block_size=work.block_size,
        kv_bits=work.kv_bits,
        max_kv_tokens=2 * (num_sequences + 1) * (work.longest + 4 * FORK_BATCHES),
        max_running=num_sequences,
        prefix_cache=prefix_cache,
    )


def held(
    engine: Engine, model: nn.Module, work: Workload, prompts: list[list[int]], ends: list[Any]
) -> Held:
    """What `engine` held for these prompts, and mlx-lm beside it; `ends` are the completions."""
    stats = engine.stats
    stored = [a + b.tokens[:-1] for a, b in zip(prompts, ends, strict=True)]
    generator = BatchGenerator(model, completion_batch_size=work.n, prefill_batch_size=work.n)
    generator.insert(prompts, [work.max_tokens] * len(prompts))
    _, mlx_lm_bytes = drain(generator, len(prompts))
    return {
        "prompt_tokens_computed": stats.prompt_tokens,
        "tokens_generated": stats.generation_tokens,
        "peak_blocks": stats.peak_blocks_in_use,
        "distinct_blocks": distinct_blocks(stored, work.block_size) or None,
        "peak_bytes": stats.peak_blocks_in_use * stats.block_bytes,
        "copies_bytes": int(stats.peak_live_tokens * stats.token_bytes),
        "mlx_lm_bytes": mlx_lm_bytes or None,
        "mlx_lm_8_bits_bytes": sum(quantized_bytes(model, len(s), 8) for s in stored) or None,
        "mlx_lm_4_bits_bytes": sum(quantized_bytes(model, len(s), 4) for s in stored) or None,
        "cow_clones": stats.cow_clones,
        "cow_bytes": stats.cow_clones * stats.block_bytes,
        "cow_clones_per_token": round(stats.cow_clones / stats.generation_tokens, 5),
    }


def run_samples(model: nn.Module, work: Workload) -> Held:
    """Samples of one prompt."""
    engine = make_engine(model, work, work.n)
    return held(engine, model, work, [work.prompt] * work.n, forked_samples(engine, work))


def run_beams(model: nn.Module, work: Workload) -> Held:
    """A beam search from the prompt. Its outcome does not tell what the other beams held."""
    engine = make_engine(model, work, 2 * work.n)
    engine.beam_search(work.prompt, work.n, max_tokens=work.max_tokens)
    return held(engine, model, work, [], [])


def run_prefixes(model: nn.Module, work: Workload) -> Held:
    """Requests that arrive together; their prompts begin alike."""
    engine = make_engine(model, work, work.n)
    ends = engine.generate(work.prompts, max_tokens=work.max_tokens)
    return held(engine, model, work, work.prompts, ends)


RUNS = {"samples": run_samples, "beams": run_beams, "prefixes": run_prefixes}


def quantized_bytes(model: nn.Module, num_tokens: int, bits: int) -> int:
    """Bytes of mlx-lm's quantized caches of one sequence; it has no batches of them."""
    total = 0
    for shape in probe(model).shapes:
        if shape is not None:
            cache = QuantizedKVCache(group_size=min(64, shape.head_dim), bits=bits)
            for start in range(0, num_tokens, MLX_LM_PREFILL_STEP):
                sizes = 1, shape.n_kv_heads, min(MLX_LM_PREFILL_STEP, num_tokens - start)
                k, v = (mx.zeros((*sizes, d), shape.dtype) for d in shape.row_dims)
                cache.update_and_fetch(k, v)
            total += cache.nbytes
    return total


def drain(generator: BatchGenerator, num_left: int) -> tuple[list[list[int]], int]:
    """Run mlx-lm until `num_left` requests have ended: their tokens, most bytes of its caches."""
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    peak = 0
    while num_left:
        _, responses = generator.next()
        for response in responses:
            tokens[response.uid].append(response.token)
            num_left -= response.finish_reason is not None
        peak = max(peak, generator.prompt_cache_nbytes)
    return list(tokens.values()), peak


def forked_samples(engine: Engine, work: Workload) -> list[Any]:
    """All samples from one computation of the prompt."""
    options: dict[str, Any] = {"temperature": TEMPERATURE, "seed": SEED}
    return engine.sample([work.prompt], work.n, max_tokens=work.max_tokens, **options)[0]


def separate_samples(engine: Engine, work: Workload) -> list[Any]:
    """The same samples from requests that know nothing of each other."""
    options: dict[str, Any] = {"max_tokens": work.max_tokens, "temperature": TEMPERATURE}
    ids = [engine.add_request(work.prompt, seed=SEED + i, **options) for i in range(work.n)]
    done: dict[int, Any] = {}
    while len(done) < work.n:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
    return [done[request_id] for request_id in ids]


class Timed(NamedTuple):
    """One way to get the samples: what they are and what it took."""

    samples: list[list[int]]
    wall_s: float
    kv_bytes_peak: int


def time_engine(
    sample: Callable[[Engine, Workload], list[Any]], engine: Engine, work: Workload
) -> Timed:
    start = time.perf_counter()
    samples = [completion.tokens for completion in sample(engine, work)]
    wall_s = time.perf_counter() - start
    return Timed(samples, wall_s, engine.stats.peak_blocks_in_use * engine.stats.block_bytes)


def time_mlx_lm(model: nn.Module, work: Workload) -> Timed:
    """mlx-lm's fastest way: the prompt computed once, its cache copied into one batch n times."""
    start = time.perf_counter()
    cache = make_prompt_cache(model)
    *head, last = work.prompt
    for i in range(0, len(head), MLX_LM_PREFILL_STEP):
        model(mx.array([head[i : i + MLX_LM_PREFILL_STEP]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    sampler = make_sampler(TEMPERATURE)
    generator = BatchGenerator(model, sampler=sampler, completion_batch_size=work.n)
    # Merging the caches into a batch copies them.
    generator.insert([[last]] * work.n, [work.max_tokens] * work.n, caches=[cache] * work.n)
    del cache
    samples, peak = drain(generator, work.n)
    return Timed(samples, time.perf_counter() - start, peak)


def time_samples(model: nn.Module, work: Workload, num_rounds: int) -> dict[str, Any]:
    """Get the samples in three ways, in turns; medians of the times."""

    def forked() -> Timed:
        return time_engine(forked_samples, make_engine(model, work, work.n), work)

    def separate() -> Timed:
        engine = make_engine(model, work, work.n, prefix_cache=False)
        return time_engine(separate_samples, engine, work)

    def mlx_lm() -> Timed:
        return time_mlx_lm(model, work)

    courses = {"forked": forked, "separate": separate, "mlx_lm": mlx_lm}
    runs = in_turns(courses, num_rounds, title="rounds")
    pairs = zip(runs["forked"][0].samples, runs["separate"][0].samples, strict=True)
    result: dict[str, Any] = {"same_samples": sum(a == b for a, b in pairs)}
    for name, each in runs.items():
        result[f"{name}_wall_s"] = round(median(run.wall_s for run in each), 3)
        result[f"{name}_kv_mib"] = round(max(run.kv_bytes_peak for run in each) / MIB, 2)
    return result


def time_forks(engine: Engine, work: Workload) -> dict[str, float]:
    """Median microseconds a child, of forking a running request between two steps.

    Returns:
        "fork_us" of ``engine.fork`` with no step to wait for; "allocator_fork_us" of the block
        table and the reference counts alone.
    """
    parent = engine.add_request(work.prompt, max_tokens=4 * FORK_BATCHES)
    while not engine.step():
        pass
    allocator = engine.manager.allocator
    of_engine, of_allocator = [], []
    for _ in range(FORK_BATCHES):
        children = [engine.fork(parent)]  # waits for the step under way, so it is not timed
        for _ in range(work.n):
            start = time.perf_counter()
            children.append(engine.fork(parent))
            of_engine.append(time.perf_counter() - start)
        for child in children:
            engine.abort(child)
        for child in range(-1, -work.n - 1, -1):
            start = time.perf_counter()
            allocator.fork(parent, child)
            of_allocator.append(time.perf_counter() - start)
        for child in range(-1, -work.n - 1, -1):
            allocator.free(child)
        engine.step()  # returns what the first fork waited for
        engine.step()
    engine.abort(parent)
    return {
        "fork_us": round(1e6 * median(of_engine), 2),
        "allocator_fork_us": round(1e6 * median(of_allocator), 2),
    }


def workload_of(args: argparse.Namespace) -> Workload:
    [prompt] = random_prompts(1, args.prompt_tokens, args.model)
    lengths = np.random.default_rng(SEED).integers(1, args.own_tokens + 1, args.n)
    tails = random_prompts(args.n, args.own_tokens, args.model, seed=SEED + 1)
    own = [tail[:length] for tail, length in zip(tails, lengths.tolist(), strict=True)]
    kv_bits = checked_bits("bench.memory", args.kv_bits)
    return Workload(prompt, own, args.n, args.max_tokens, args.block_size, kv_bits)


def held_table(results: dict[str, Held]) -> str:
    """Engines' K/V beside copies and mlx-lm's; bytes in MiB."""
    columns = {key: key.replace("_bytes", " MiB").replace("_", " ") for key in results["beams"]}
    rows = [["", *columns.values()]]
    for name, row in results.items():
        cells = [
            text_of(value and value / MIB, ".2f") if key.endswith("_bytes") else text_of(value, "g")
            for key, value in row.items()
        ]
        rows.append([name, *cells])
    return table(rows)


def print_times(result: dict[str, Any]) -> None:
    print(
        f"\nOne fork takes {result['fork_us']:.1f} us, of which"
        f" {result['allocator_fork_us']:.1f} us for block table and reference counts.\n"
        f"{result['same_samples']} of {result['n']} samples are the same from separate requests."
    )
    rows = [["samples", "wall s", "over forked", "KV MiB at peak"]]
    for name in ("forked", "separate", "mlx_lm"):
        wall_s = result[f"{name}_wall_s"]
        ratio = f"{wall_s / result['forked_wall_s']:.1f}x"
        rows.append([name, f"{wall_s:.2f}", ratio, f"{result[f'{name}_kv_mib']:.1f}"])
    print(table(rows))


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    model, work = named_model(args.model), workload_of(args)
    print(
        f"Floor of the samples: {work.ideal_blocks:.1f} blocks of {args.block_size}, none partly"
        " empty. Floor of all: blocks of different content (distinct).",
        flush=True,
    )
    results: dict[str, Held] = {}
    for name, run in tqdm(RUNS.items(), unit="workload", disable=None):
        results[name] = run(model, work)
    ratio = results["samples"]["peak_blocks"] / work.ideal_blocks
    print(held_table(results), f"Samples at peak: {ratio:.3f} of their floor.", sep="\n")
    result = {**vars(args), **results, "kv_blocks_ideal": work.ideal_blocks}
    result["ratio"] = round(ratio, 4)
    if args.rounds:
        machine = check_machine()
        print(machine_text(machine))
        result |= machine | time_samples(model, work, args.rounds)
        result |= time_forks(make_engine(model, work, work.n + 2), work)
        print_times(result)
    print_result("memory", result)


if __name__ == "__main__":
    main()
