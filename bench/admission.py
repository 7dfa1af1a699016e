"""What it costs that a sequence joins, leaves or branches off a batch with much live K/V.

Two measurements, each beside mlx-lm in turns: what the calls on prompt caches cost by themselves,
and what a short request that comes and goes costs a batch generator that is decoding.

    python -m bench.admission --rows 8 --tokens 4096
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator as MlxLmBatchGenerator
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache
from tqdm import tqdm

from bench.cache_calls import GROWTH, Cost, LiveBatch, copy_ms, cost_of, prompt_cache, token_bytes
from bench.models import SIZES, check_machine, llama_model, random_prompts
from mlx_paged import BatchGenerator, make_prompt_cache, patched_mlx_lm
from mlx_paged.allocation import ceil_div
from mlx_paged.common_args import COUNT, Parser
from mlx_paged.shared_pool import BLOCK_SIZE

MIB = 2**20
PLAIN_STEPS = 3
"""Steps of decodes alone before each visit."""

CALLS = {
    "growth": f"{GROWTH} tokens more of every row than there is room for",
    "decode": "one token of every row",
    "admission": "merge and extend by one sequence",
    "first decode": "one token of every row, the new one included",
    "completion": "filter",
    "fork": "deepcopy and one token of every row of the copy",
}

VISIT = "visit"

Costs = defaultdict[tuple[str, str], list[Cost]]
"""Of each round, by what was measured and whose it is."""


def measure_calls(args: argparse.Namespace, model: nn.Module, costs: Costs) -> None:
    """One round: a batch of each kind, and every call on one after the other."""
    makers = {"mlx_lm": make_mlx_lm_cache, "mlx_paged": make_prompt_cache}
    batches = {
        name: LiveBatch(make, model, args.rows, args.tokens) for name, make in makers.items()
    }
    calls: dict[str, Callable[[LiveBatch], Cost]] = {
        "growth": LiveBatch.grow,
        "decode": LiveBatch.decode,
        "admission": lambda batch: batch.admit(args.admitted_tokens),
        "first decode": LiveBatch.decode,
        "completion": LiveBatch.complete,
        "fork": LiveBatch.fork,
    }
    for call, run in calls.items():
        for name, batch in batches.items():
            costs[call, name].append(run(batch))


class Streams:
    """A batch generator that decodes, with the calls of mlx-lm's.

    Args:
        generator: of whichever kind.
        scope: makes a context that is entered whenever it computes.
    """

    def __init__(
        self, generator: Any, scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._generator = generator
        self._scope = scope

    def start(self, prompts: list[list[int]], max_tokens: int, **options: Any) -> None:
        """Decode for each of these prompts, until all have given a token."""
        with self._scope():
            waiting = set(self._generator.insert(prompts, [max_tokens] * len(prompts), **options))
            while waiting:
                waiting -= {response.uid for response in self._generator.next()[1]}

    def visit(self, prompt: list[int]) -> Cost:
        """A request of one token comes and goes: what it costs beyond the steps of the others."""
        with self._scope():
            plain = [self._step_ms() for _ in range(PLAIN_STEPS)]
            num_steps = 0

            def come_and_go() -> None:
                nonlocal num_steps
                (uid,) = self._generator.insert([prompt], [1])
                ended: set[int] = set()
                while uid not in ended:
                    ended = {response.uid for response in self._generator.next()[1]}
                    num_steps += bool(ended - {uid})  # a call may tell of prompts alone
                self._generator.next()
                num_steps += 1

            cost = cost_of(come_and_go)
            plain += [self._step_ms() for _ in range(PLAIN_STEPS)]
        return Cost(cost.ms - num_steps * median(plain), cost.peak, cost.kept)

    def _step_ms(self) -> float:
        start = time.perf_counter()
        self._generator.next()
        return 1000 * (time.perf_counter() - start)


def start_streams(args: argparse.Namespace, model: nn.Module) -> dict[str, Streams]:
    """Generators whose streams have as many tokens behind them as the batches of the calls."""
    max_tokens = 100 * args.rounds  # more than the rounds need
    prompts = random_prompts(args.rows, args.tokens, args.model)
    last = [[prompt[-1]] for prompt in prompts]
    options = {"completion_batch_size": args.rows + 1}

    mlx_lm = Streams(MlxLmBatchGenerator(model, **options))
    patched = Streams(MlxLmBatchGenerator(model, **options), patched_mlx_lm)
    for streams, make in ((mlx_lm, make_mlx_lm_cache), (patched, make_prompt_cache)):
        caches = [prompt_cache(make, model, args.tokens, row) for row in range(args.rows)]
        streams.start(last, max_tokens, caches=caches)

    num_blocks = (args.rows + 1) * ceil_div(args.tokens + max_tokens, BLOCK_SIZE)
    ours = Streams(BatchGenerator(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, **options))
    ours.start(prompts, max_tokens)
    return {"mlx_lm": mlx_lm, "mlx_lm, patched": patched, "mlx_paged": ours}


def make_parser() -> Parser:
    parser = Parser(prog="bench.admission", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=COUNT, default=8, help="sequences with live K/V")
    parser.add_argument("--tokens", type=COUNT, default=4096, help="that each of them holds")
    parser.add_argument(
        "--admitted-tokens", type=COUNT, default=128, help="of the sequence that joins"
    )
    parser.add_argument(
        "--visitor-tokens", type=COUNT, default=8, help="of the prompt that comes and goes"
    )
    parser.add_argument("--rounds", type=COUNT, default=5, help="of which all are medians")
    parser.add_argument(
        "--model", choices=SIZES, default="many-kv-heads", help="shape of the model"
    )
    return parser


def measure(args: argparse.Namespace, model: nn.Module) -> Costs:
    """All rounds of both measurements."""
    costs: Costs = defaultdict(list)
    with tqdm(total=2 * args.rounds, unit="round", disable=None) as progress:
        for _ in range(args.rounds):
            measure_calls(args, model, costs)
            progress.update()
        streams = start_streams(args, model)
        visitors = random_prompts(args.rounds, args.visitor_tokens, args.model, seed=1)
        for visitor in visitors:
            for name, each in streams.items():
                costs[VISIT, name].append(each.visit(visitor))
            progress.update()
    return costs


def medians(costs: Iterable[Cost]) -> dict[str, float]:
    costs = list(costs)
    return {
        "ms": round(median(cost.ms for cost in costs), 3),
        "peak_mib": round(median(cost.peak for cost in costs) / MIB, 2),
        "kept_mib": round(median(cost.kept for cost in costs) / MIB, 2),
    }


def print_row(what: str, name: str, row: dict[str, float]) -> None:
    print(
        f"{what:14}{name:18}{row['ms']:10.2f}{row['peak_mib']:12.1f}{row['kept_mib']:12.1f}",
    )


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    machine = check_machine()
    model = llama_model(args.model)
    live_bytes = args.rows * args.tokens * token_bytes(model)
    floor_ms = copy_ms(live_bytes)
    print(
        f"{args.rows} sequences of {args.tokens} tokens: {live_bytes / MIB:.0f} MiB of live K/V."
        f" Rounds: {args.rounds}; load average {machine['load_average']:.1f}.\n"
        f"Floor of whatever moves it: {floor_ms:.0f} ms, one copy"
        f" ({live_bytes / floor_ms / 1e6:.1f} GB/s). Floor of what moves none: 0.\n"
        f"{'':32}{'ms':>10}{'peak MiB':>12}{'kept MiB':>12}"
    )
    costs = measure(args, model)
    rows = {key: medians(each) for key, each in costs.items()}
    for (what, name), row in rows.items():
        print_row(what, name, row)
    for call, meaning in CALLS.items():
        print(f"{call}: {meaning}")
    print(
        f"{VISIT}: a request of {args.visitor_tokens} prompt tokens and one token comes to a"
        " decoding batch generator and goes; beyond the others' steps"
    )
    result: dict[str, Any] = {
        "bench": "admission",
        **vars(args),
        **machine,
        "live_mib": round(live_bytes / MIB, 2),
        "copy_ms": round(floor_ms, 2),
    }
    for (what, name), row in rows.items():
        result.setdefault(what, {})[name] = row
    print(json.dumps(result))


if __name__ == "__main__":
    main()
