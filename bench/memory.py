"""What sharing saves: blocks, copies on write and bytes of samples, beams and shared prefixes.

    python -m bench.memory --prompt-tokens 500 --n 16 --max-tokens 64

Everything here is counted, nothing is timed: the same arguments print the same numbers. The last
line is one JSON object.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from tqdm import tqdm

from bench.models import AT_LEAST_TWO, SIZES, llama_model, random_prompts
from mlx_paged import Engine
from mlx_paged.allocation import ceil_div
from mlx_paged.common_args import COUNT, KV_BLOCK_SIZES, Parser

MIB = 2**20
SEED = 0


@dataclass(frozen=True)
class Workload:
    """`n` sequences of `max_tokens` tokens each that begin with one prompt.

    Attributes:
        own_tokens: that each sequence has after the shared prompt, where it is only a prefix.
    """

    prompt: list[int]
    own_tokens: list[list[int]]
    n: int
    max_tokens: int
    block_size: int

    @property
    def prompts(self) -> list[list[int]]:
        return [self.prompt + own for own in self.own_tokens]

    def num_tokens(self, own: int) -> int:
        """Tokens of a sequence whose K/V is needed: all but the last that it generates."""
        return len(self.prompt) + own + self.max_tokens - 1


@dataclass(frozen=True)
class Held:
    """What one workload held at most, and what was copied for it.

    Attributes:
        distinct_blocks: of all sequences when they end, if no two blocks hold the same tokens after
            the same ones; None: not known from the outcome.
        copies_bytes: K/V of the same sequences side by side if none shared anything, token for
            token.
        mlx_lm_bytes: what mlx-lm's BatchGenerator held for them; None: it has no such thing.
        cow_clones_per_token: blocks copied on write for each token generated.
    """

    prompt_tokens_computed: int
    tokens_generated: int
    peak_blocks: int
    distinct_blocks: int | None
    peak_bytes: int
    copies_bytes: int
    mlx_lm_bytes: int | None
    cow_clones: int
    cow_bytes: int
    cow_clones_per_token: float


def distinct_blocks(sequences: Iterable[Sequence[int]], block_size: int) -> int:
    """Blocks for all `sequences` if those that hold the same tokens after the same ones are one."""
    blocks: set[tuple[int, ...]] = set()
    for tokens in sequences:
        blocks.update(
            tuple(tokens[: (i + 1) * block_size]) for i in range(ceil_div(len(tokens), block_size))
        )
    return len(blocks)


def make_engine(model: nn.Module, work: Workload, num_sequences: int) -> Engine:
    """An engine that never lacks a block, even if nothing is shared."""
    longest = work.num_tokens(max(map(len, work.own_tokens), default=0)) + work.block_size
    return Engine(
        model,
        block_size=work.block_size,
        max_kv_tokens=2 * (num_sequences + 1) * longest,
        max_running=num_sequences,
    )


def held(engine: Engine, distinct: int | None, mlx_lm_bytes: int | None) -> Held:
    stats = engine.stats
    return Held(
        stats.prompt_tokens,
        stats.generation_tokens,
        stats.peak_blocks_in_use,
        distinct,
        stats.peak_blocks_in_use * stats.block_bytes,
        int(stats.peak_live_tokens * stats.token_bytes),
        mlx_lm_bytes,
        stats.cow_clones,
        stats.cow_clones * stats.block_bytes,
        round(stats.cow_clones / stats.generation_tokens, 5),
    )


def run_samples(model: nn.Module, work: Workload) -> Held:
    """Samples of one prompt."""
    engine = make_engine(model, work, work.n)
    [samples] = engine.sample(
        [work.prompt], work.n, max_tokens=work.max_tokens, temperature=1.0, seed=SEED
    )
    stored = [work.prompt + sample.tokens[:-1] for sample in samples]
    theirs = mlx_lm_bytes(model, [work.prompt] * work.n, work.max_tokens)
    return held(engine, distinct_blocks(stored, work.block_size), theirs)


def run_beams(model: nn.Module, work: Workload) -> Held:
    """A beam search from the prompt."""
    engine = make_engine(model, work, 2 * work.n)
    engine.beam_search(work.prompt, work.n, max_tokens=work.max_tokens)
    return held(engine, None, None)


def run_prefixes(model: nn.Module, work: Workload) -> Held:
    """Requests that come at once and whose prompts begin alike."""
    engine = make_engine(model, work, work.n)
    completions = engine.generate(work.prompts, max_tokens=work.max_tokens)
    stored = [
        prompt + completion.tokens[:-1]
        for prompt, completion in zip(work.prompts, completions, strict=True)
    ]
    theirs = mlx_lm_bytes(model, work.prompts, work.max_tokens)
    return held(engine, distinct_blocks(stored, work.block_size), theirs)


def mlx_lm_bytes(model: nn.Module, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """The most that mlx-lm's caches held while it served `prompts` at once."""
    count = len(prompts)
    generator = BatchGenerator(model, completion_batch_size=count, prefill_batch_size=count)
    generator.insert([list(prompt) for prompt in prompts], [max_tokens] * count)
    peak, left = 0, count
    while left:
        _, responses = generator.next()
        left -= sum(response.finish_reason is not None for response in responses)
        peak = max(peak, generator.prompt_cache_nbytes)
    return peak


RUNS: dict[str, Callable[[nn.Module, Workload], Held]] = {
    "samples": run_samples,
    "beams": run_beams,
    "prefixes": run_prefixes,
}


def make_parser() -> Parser:
    parser = Parser(prog="bench.memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt-tokens", type=COUNT, default=500, help="that sequences share")
    parser.add_argument(
        "--own-tokens", type=AT_LEAST_TWO, default=100, help="longest prompt after a shared prefix"
    )
    parser.add_argument("--n", type=COUNT, default=16, help="samples, beams, requests")
    parser.add_argument("--max-tokens", type=AT_LEAST_TWO, default=64, help="of each sequence")
    parser.add_argument(
        "--block-size", type=int, choices=KV_BLOCK_SIZES, default=16, help="tokens in a KV block"
    )
    parser.add_argument("--model", choices=SIZES, default="reference", help="shape of the model")
    return parser


def print_report(results: dict[str, Held]) -> None:
    print(
        f"{'':12}{'blocks':>8}{'distinct':>10}{'MiB':>9}{'copies MiB':>12}{'mlx-lm MiB':>12}"
        f"{'COW':>6}{'COW/token':>11}{'prompt tokens computed':>24}"
    )
    for name, row in results.items():
        distinct = "-" if row.distinct_blocks is None else str(row.distinct_blocks)
        theirs = "-" if row.mlx_lm_bytes is None else f"{row.mlx_lm_bytes / MIB:.2f}"
        print(
            f"{name:12}{row.peak_blocks:8}{distinct:>10}{row.peak_bytes / MIB:9.2f}"
            f"{row.copies_bytes / MIB:12.2f}{theirs:>12}{row.cow_clones:6}"
            f"{row.cow_clones_per_token:11.4f}{row.prompt_tokens_computed:24}"
        )


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    model = llama_model(args.model)
    [prompt] = random_prompts(1, args.prompt_tokens, args.model)
    lengths = np.random.default_rng(SEED).integers(1, args.own_tokens + 1, args.n)
    tails = random_prompts(args.n, args.own_tokens, args.model, seed=SEED + 1)
    own = [tail[:length] for tail, length in zip(tails, lengths.tolist(), strict=True)]
    work = Workload(prompt, own, args.n, args.max_tokens, args.block_size)
    results: dict[str, Held] = {}
    for name, run in tqdm(RUNS.items(), unit="workload", disable=None):
        results[name] = run(model, work)
    print_report(results)
    result: dict[str, Any] = {"bench": "memory", **vars(args)}
    print(json.dumps(result | {name: asdict(row) for name, row in results.items()}))


if __name__ == "__main__":
    main()
