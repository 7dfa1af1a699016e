"""What n samples of one prompt cost: tokens computed, blocks held, time; beside mlx-lm.

python -m bench.forks --prompt-tokens 2000 --n 16 --max-tokens 64
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

from bench.models import AT_LEAST_TWO, SIZES, check_machine, llama_model, random_prompts
from mlx_paged import Engine
from mlx_paged.allocation import ceil_div
from mlx_paged.common_args import COUNT, Parser
from mlx_paged.generate_args import KV_BLOCK_SIZES

MIB = 2**20
SEED = 0
TEMPERATURE = 1.0
MLX_LM_PREFILL_STEP = 2048
"""mlx-lm's own default."""

FORK_BATCHES = 20
"""Fork times are a median over so many times n children."""


@dataclass(frozen=True)
class Workload:
    """`n` samples of `max_tokens` tokens each from one prompt, in blocks of `block_size`."""

    prompt: list[int]
    n: int
    max_tokens: int
    block_size: int

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K/V is needed: the prompt once, of every sample all but its last token."""
        return len(self.prompt) + self.n * (self.max_tokens - 1)

    @property
    def ideal_blocks(self) -> float:
        """Blocks if none was partly empty."""
        return self.kv_tokens / self.block_size

    @property
    def least_blocks(self) -> int:
        """Blocks that it takes: the prompt's full ones once, for every sample whole ones beyond."""
        num_shared = len(self.prompt) // self.block_size
        num_each = ceil_div(len(self.prompt) + self.max_tokens - 1, self.block_size) - num_shared
        return num_shared + self.n * num_each


@dataclass(frozen=True)
class Run:
    """One way to get the samples: what they are and what it took."""

    samples: list[list[int]]
    wall_s: float
    kv_bytes_peak: int


def make_engine(model: nn.Module, work: Workload, *, prefix_cache: bool = True) -> Engine:
    """An engine that never lacks a block, even if nothing is shared."""
    return Engine(
        model,
        block_size=work.block_size,
        max_kv_tokens=2 * (work.n + 1) * (len(work.prompt) + work.max_tokens + FORK_BATCHES),
        max_running=work.n + 2,
        prefix_cache=prefix_cache,
    )


def run_forked(engine: Engine, work: Workload) -> Run:
    """All samples from one computation of the prompt."""
    return timed(
        engine,
        lambda: engine.sample(
            [work.prompt], work.n, max_tokens=work.max_tokens, temperature=TEMPERATURE, seed=SEED
        )[0],
    )


def run_separate(engine: Engine, work: Workload) -> Run:
    """The same samples from requests that know nothing of each other."""

    def complete() -> list[Any]:
        ids = [
            engine.add_request(
                work.prompt, max_tokens=work.max_tokens, temperature=TEMPERATURE, seed=SEED + i
            )
            for i in range(work.n)
        ]
        done: dict[int, Any] = {}
        while len(done) < work.n:
            done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        return [done[request_id] for request_id in ids]

    return timed(engine, complete)


def timed(engine: Engine, complete: Callable[[], list[Any]]) -> Run:
    start = time.perf_counter()
    completions = complete()
    wall_s = time.perf_counter() - start
    peak = engine.stats.peak_blocks_in_use * engine.stats.block_bytes
    return Run([completion.tokens for completion in completions], wall_s, peak)


def run_mlx_lm(model: nn.Module, work: Workload) -> Run:
    """mlx-lm at its best: the prompt computed once, its cache copied into one batch n times."""
    start = time.perf_counter()
    cache = make_prompt_cache(model)
    *head, last = work.prompt
    for i in range(0, len(head), MLX_LM_PREFILL_STEP):
        model(mx.array([head[i : i + MLX_LM_PREFILL_STEP]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    generator = BatchGenerator(
        model, sampler=make_sampler(TEMPERATURE), completion_batch_size=work.n
    )
    ids = generator.insert(
        [[last]] * work.n,
        [work.max_tokens] * work.n,
        caches=[cache] * work.n,  # merging them into a batch copies
    )
    del cache
    samples: dict[int, list[int]] = {request_id: [] for request_id in ids}
    peak, num_left = 0, work.n
    while num_left:
        _, responses = generator.next()
        for response in responses:
            samples[response.uid].append(response.token)
            num_left -= response.finish_reason is not None
        peak = max(peak, generator.prompt_cache_nbytes)
    return Run(list(samples.values()), time.perf_counter() - start, peak)


@dataclass(frozen=True)
class ForkTimes:
    """Microseconds a child, medians.

    Attributes:
        engine: ``engine.fork`` of a request under way, with no step to wait for.
        allocator: the block table and the reference counts alone.
    """

    engine: float
    allocator: float


def time_forks(engine: Engine, work: Workload) -> ForkTimes:
    """Fork a running request n times between two steps, again and again."""
    parent = engine.add_request(work.prompt, max_tokens=4 * FORK_BATCHES)
    while not engine.step():
        pass
    allocator = engine.manager.allocator
    of_engine, of_allocator = [], []
    for _ in range(FORK_BATCHES):
        children = [engine.fork(parent)]  # reads the step under way first, hence not timed
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
        engine.step()  # hands out what the first fork read
        engine.step()
    engine.abort(parent)
    return ForkTimes(1e6 * median(of_engine), 1e6 * median(of_allocator))


def make_parser() -> Parser:
    parser = Parser(prog="bench.forks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt-tokens", type=COUNT, default=2000)
    parser.add_argument("--n", type=COUNT, default=16, help="samples of the prompt")
    parser.add_argument("--max-tokens", type=AT_LEAST_TWO, default=64, help="of each sample")
    parser.add_argument(
        "--block-size", type=int, choices=KV_BLOCK_SIZES, default=16, help="tokens in a KV block"
    )
    parser.add_argument("--rounds", type=COUNT, default=3, help="of which wall times are medians")
    parser.add_argument("--model", choices=SIZES, default="reference", help="shape of the model")
    return parser


def count(engine: Engine, work: Workload) -> dict[str, Any]:
    """What an engine that has run the samples computed, held and copied."""
    stats = engine.stats
    return {
        "prompt_tokens_computed": stats.prompt_tokens,
        "kv_blocks_peak": stats.peak_blocks_in_use,
        "kv_blocks_ideal": work.ideal_blocks,
        "kv_blocks_least": work.least_blocks,
        "ratio": round(stats.peak_blocks_in_use / work.ideal_blocks, 4),
        "cow_clones": stats.cow_clones,
        "cow_bytes": stats.cow_clones * stats.block_bytes,
    }


def compare(
    model: nn.Module, work: Workload, num_rounds: int
) -> tuple[dict[str, Any], dict[str, list[Run]]]:
    """Run the samples in all three ways, in turns; returns what was counted, and the runs."""
    runs: dict[str, list[Run]] = {"forked": [], "separate": [], "mlx_lm": []}
    with tqdm(total=num_rounds * len(runs), unit="run", disable=None) as progress:
        for _ in range(num_rounds):
            engine = make_engine(model, work)
            runs["forked"].append(run_forked(engine, work))
            counted = count(engine, work)
            progress.update()
            engine = make_engine(model, work, prefix_cache=False)
            runs["separate"].append(run_separate(engine, work))
            progress.update()
            runs["mlx_lm"].append(run_mlx_lm(model, work))
            progress.update()
    return counted, runs


def print_report(args: argparse.Namespace, work: Workload, result: dict[str, Any]) -> None:
    least, ideal = result["kv_blocks_least"], result["kv_blocks_ideal"]
    print(
        f"{args.n} samples of {args.max_tokens} tokens from a prompt of {args.prompt_tokens}"
        f" (float32 GEMM: {result['gemm_gflops']:.0f} GFLOP/s; load average"
        f" {result['load_average']:.1f})\n"
        f"Floor: {work.kv_tokens} tokens of K/V = {ideal:.1f} blocks of {args.block_size};"
        f" {least} whole ones, {100 * (least / ideal - 1):.1f} % of it for blocks not full\n"
        f"prompt tokens computed  {result['prompt_tokens_computed']}\n"
        f"KV blocks at peak       {result['kv_blocks_peak']} = {result['ratio']:.3f} of the floor\n"
        f"copied on write         {result['cow_clones']} blocks, {result['cow_bytes']} bytes\n"
        f"fork                    {result['fork_us']:.1f} us a child, of which"
        f" {result['allocator_fork_us']:.1f} us block table and reference counts\n"
        f"as separate requests    {result['same_samples']} of {args.n} samples are the same\n"
        f"{'':24}{'wall s':>8}{'KV MiB at peak':>16}"
    )
    for name in ("forked", "separate", "mlx_lm"):
        print(f"{name:24}{result[f'{name}_wall_s']:8.2f}{result[f'{name}_kv_mib']:16.1f}")


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    machine = check_machine()
    model = llama_model(args.model)
    [prompt] = random_prompts(1, args.prompt_tokens, args.model)
    work = Workload(prompt, args.n, args.max_tokens, args.block_size)
    counted, runs = compare(model, work, args.rounds)
    forks = time_forks(make_engine(model, work), work)
    pairs = zip(runs["forked"][0].samples, runs["separate"][0].samples, strict=True)
    result = {
        "bench": "forks",
        **vars(args),
        **machine,
        **counted,
        "fork_us": round(forks.engine, 2),
        "allocator_fork_us": round(forks.allocator, 2),
        "same_samples": sum(a == b for a, b in pairs),
    }
    for name, each in runs.items():
        result[f"{name}_wall_s"] = round(median(run.wall_s for run in each), 3)
        result[f"{name}_kv_mib"] = round(max(run.kv_bytes_peak for run in each) / MIB, 2)
    print_report(args, work, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
