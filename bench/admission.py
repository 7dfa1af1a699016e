"""What it costs that a sequence joins, leaves or forks beside much live K/V.

Two measurements, each in turns with mlx-lm: the calls on prompt caches alone, and a short request
that comes and goes in a batch generator that decodes.

    python -m bench.admission --rows 8 --tokens 4096
"""

import argparse
import copy
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator as MlxLmBatchGenerator
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache
from tqdm import tqdm

from bench.command import MIB, print_result, table
from bench.flags.admission import parse
from bench.flags.clock import Clock
from bench.machine import check_machine, machine_text
from bench.models import named_model, random_prompts
from bench.pairs import turns
from mlx_paged import BatchGenerator, make_prompt_cache, patched_mlx_lm
from mlx_paged.drop_in.base_cache import PagedCache
from mlx_paged.kv.blocks import ceil_div
from mlx_paged.options import BLOCK_SIZE

PLAIN_STEPS = 3  # steps of decodes alone before each visit, and after it

Caches = list[Any]
"""mlx-lm's caches, one a layer."""

MakeCaches = Callable[[nn.Module], Caches]

GROWTH = 200  # tokens written to make room necessary: fewer than the 256 by which mlx-lm then grows


@dataclass(frozen=True)
class Cost:
    """What a call took; bytes are beyond those before the call."""

    ms: float  # until its arrays were evaluated
    peak: int  # most bytes at any moment
    kept: int  # bytes at its end


def cost_of(call: Callable[[], object]) -> Cost:
    """Run `call`, which evaluates its arrays."""
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    start = time.perf_counter()
    call()
    ms = 1000 * (time.perf_counter() - start)
    return Cost(ms, max(0, mx.get_peak_memory() - before), mx.get_active_memory() - before)


def copy_ms(num_bytes: int) -> float:
    """Milliseconds to copy so many bytes in memory: the best of several copies."""
    source = np.ones(num_bytes, np.uint8)
    target = source.copy()
    return 1000 * min(Clock.WALL.seconds(lambda: np.copyto(target, source), 1) for _ in range(3))


def prompt_cache(make: MakeCaches, model: nn.Module, num_tokens: int, seed: int) -> Caches:
    """The caches of one sequence with random K/V; `make` is a make_prompt_cache."""
    caches = make(model)
    mx.random.seed(seed)
    for cache in caches:
        cache.update_and_fetch(*random_kv(model, 1, num_tokens))
    evaluate(caches)
    return caches


def random_kv(model: nn.Module, rows: int, num_tokens: int) -> mx.array:
    """K and V of one layer, ``[2, rows, H_kv, num_tokens, D]`` float32."""
    head_dim = model.args.hidden_size // model.args.num_attention_heads
    return mx.random.normal((2, rows, model.args.num_key_value_heads, num_tokens, head_dim))


def token_bytes(model: nn.Module) -> int:
    """Bytes of K/V of one token in all layers."""
    return len(model.layers) * int(random_kv(model, 1, 1).nbytes)


def merged(singles: list[Caches]) -> Caches:
    """Sequences as one batch."""
    return [type(column[0]).merge(column) for column in zip(*singles, strict=True)]


def evaluate(caches: Caches) -> None:
    """Finish the writes; `keys` and `values` of a paged cache would be copies."""
    paged = (cache.layer.kv.handles() for cache in caches if isinstance(cache, PagedCache))
    stock = ((c.keys, c.values) for c in caches if not isinstance(c, PagedCache))
    mx.eval([*paged, *stock])


class LiveBatch:
    """A batch of `rows` sequences of `num_tokens` tokens each, without room for one more token.

    Args:
        make: mlx-lm's make_prompt_cache or one in its place.
        admitted: tokens of the sequence that :meth:`admit` adds.
    """

    def __init__(
        self, make: MakeCaches, model: nn.Module, rows: int, num_tokens: int, admitted: int
    ) -> None:
        self.model = model
        self.rows = rows
        self.admitted = admitted
        self._make = make
        self.caches = merged([prompt_cache(make, model, num_tokens, row) for row in range(rows)])
        evaluate(self.caches)

    def grow(self) -> Cost:
        """Write more tokens of every row than there is room for."""
        return self._cost_of_writing(GROWTH)

    def decode(self) -> Cost:
        """Write one token of every row."""
        return self._cost_of_writing(1)

    def _cost_of_writing(self, num_tokens: int) -> Cost:
        kv = self._random_tokens(len(self.caches[0].offset.tolist()), num_tokens)
        return cost_of(lambda: self._write(self.caches, kv))

    def admit(self) -> Cost:
        """Add a sequence."""
        newcomer = prompt_cache(self._make, self.model, self.admitted, self.rows)

        def join() -> None:
            for cache, other in zip(self.caches, merged([newcomer]), strict=True):
                cache.extend(other)
            evaluate(self.caches)

        return cost_of(join)

    def complete(self) -> Cost:
        """Remove the sequence that :meth:`admit` added."""

        def leave() -> None:
            for cache in self.caches:
                cache.filter(list(range(self.rows)))
            evaluate(self.caches)

        return cost_of(leave)

    def fork(self) -> Cost:
        """Copy all caches and write one token of every row of the copy."""
        kv = self._random_tokens(self.rows, 1)
        twins: list[Caches] = []

        def branch() -> None:
            twins.append(copy.deepcopy(self.caches))
            self._write(twins[0], kv)

        return cost_of(branch)

    def _random_tokens(self, rows: int, num_tokens: int) -> list[mx.array]:
        """K and V of every layer."""
        kv = [random_kv(self.model, rows, num_tokens) for _ in self.caches]
        mx.eval(kv)
        return kv

    def _write(self, caches: Caches, kv: list[mx.array]) -> None:
        for cache, (keys, values) in zip(caches, kv, strict=True):
            cache.update_and_fetch(keys, values)
        evaluate(caches)


CALLS: dict[str, tuple[str, Callable[[LiveBatch], Cost]]] = {
    "growth": (f"{GROWTH} tokens more of every row than there is room for", LiveBatch.grow),
    "decode": ("one token of every row", LiveBatch.decode),
    "admission": ("merge and extend by one sequence", LiveBatch.admit),
    "first decode": ("one token of every row, the new one included", LiveBatch.decode),
    "completion": ("filter", LiveBatch.complete),
    "fork": ("deepcopy and one token of every row of the copy", LiveBatch.fork),
}
"""What each call is, and the call."""

VISIT = "visit"

Costs = defaultdict[tuple[str, str], list[Cost]]
"""Of each round, by what was measured and whose it is."""


def measure_calls(args: argparse.Namespace, model: nn.Module, costs: Costs) -> None:
    """One round: a batch of each kind, and all calls on both, one after the other."""
    makers = {"mlx_lm": make_mlx_lm_cache, "mlx_paged": make_prompt_cache}
    sizes = (args.rows, args.tokens, args.admitted_tokens)
    batches = {name: LiveBatch(make, model, *sizes) for name, make in makers.items()}
    calls = [(call, run) for call, (_, run) in CALLS.items()]
    for i, name in turns(batches, len(calls)):
        call, run = calls[i]
        costs[call, name].append(run(batches[name]))


class Streams:
    """A batch generator that decodes, mlx-lm's or one with the same methods.

    Args:
        scope: makes the context in which the generator computes.
    """

    def __init__(
        self, generator: Any, scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._generator = generator
        self._scope = scope

    def start(self, prompts: list[list[int]], max_tokens: int, **options: Any) -> None:
        """Add these prompts, and step until each has given a token."""
        with self._scope():
            waiting = set(self._generator.insert(prompts, [max_tokens] * len(prompts), **options))
            while waiting:
                waiting -= {response.uid for response in self._generator.next()[1]}

    def visit(self, prompt: list[int]) -> Cost:
        """The cost of a request with one output token, without the steps of the others."""
        with self._scope():
            plain = [self._step_ms() for _ in range(PLAIN_STEPS)]
            num_steps = 0

            def come_and_go() -> None:
                nonlocal num_steps
                (uid,) = self._generator.insert([prompt], [1])
                ended: set[int] = set()
                while uid not in ended:
                    ended = {response.uid for response in self._generator.next()[1]}
                    num_steps += bool(ended - {uid})  # a call may report prompts alone
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
    """Generators whose streams have as much K/V as the batches of the calls."""
    max_tokens = 100 * args.rounds  # enough for all rounds
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


def measure(args: argparse.Namespace, model: nn.Module) -> Costs:
    """All rounds of both measurements."""
    costs: Costs = defaultdict(list)
    for _ in tqdm(range(args.rounds), desc="calls", disable=None):
        measure_calls(args, model, costs)
    streams = start_streams(args, model)
    visitors = random_prompts(args.rounds, args.visitor_tokens, args.model, seed=1)
    for i, name in turns(streams, args.rounds, title="visits"):
        costs[VISIT, name].append(streams[name].visit(visitors[i]))
    return costs


def medians(costs: list[Cost]) -> dict[str, float]:
    return {
        "ms": round(median(cost.ms for cost in costs), 3),
        "peak_mib": round(median(cost.peak for cost in costs) / MIB, 2),
        "kept_mib": round(median(cost.kept for cost in costs) / MIB, 2),
    }


def cost_table(rows: dict[tuple[str, str], dict[str, float]]) -> str:
    form = "{ms:.2f} {peak_mib:.1f} {kept_mib:.1f}"
    lines = [[what, name, *form.format(**row).split()] for (what, name), row in rows.items()]
    return table([["", "", "ms", "peak MiB", "kept MiB"], *lines])


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    machine = check_machine()
    model = named_model(args.model)
    live_bytes = args.rows * args.tokens * token_bytes(model)
    floor_ms = copy_ms(live_bytes)
    print(
        f"{args.rows} sequences of {args.tokens} tokens: {live_bytes / MIB:.0f} MiB of live K/V."
        f" Rounds: {args.rounds}; {machine_text(machine)}.\n"
        f"Floor of a call that moves all live K/V: {floor_ms:.0f} ms, one copy"
        f" ({live_bytes / floor_ms / 1e6:.1f} GB/s). Floor of a call that moves none: 0."
    )
    costs = measure(args, model)
    rows = {key: medians(each) for key, each in costs.items()}
    print(cost_table(rows))
    for call, (meaning, _) in CALLS.items():
        print(f"{call}: {meaning}")
    print(
        f"{VISIT}: a request of {args.visitor_tokens} prompt tokens and one output token in a"
        " batch generator that decodes, without the steps of the others"
    )
    result: dict[str, Any] = {**vars(args), **machine, "live_mib": round(live_bytes / MIB, 2)}
    result["copy_ms"] = round(floor_ms, 2)
    for (what, name), row in rows.items():
        result.setdefault(what, {})[name] = row
    print_result("admission", result)


if __name__ == "__main__":
    main()
