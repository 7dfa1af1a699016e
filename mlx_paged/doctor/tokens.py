"""Compares tokens of the engine with those of mlx-lm, and reads of a pool with what was written."""

from collections.abc import Sequence
from functools import cache
from itertools import count

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step

from mlx_paged import ops
from mlx_paged.doctor.findings import Findings
from mlx_paged.doctor.float64 import Array
from mlx_paged.engine.engine import Engine
from mlx_paged.kv.blocks import BlockCopy
from mlx_paged.kv.pool import KVPool, as_int32
from mlx_paged.kv.shapes import KVShape
from mlx_paged.loading import load_model
from mlx_paged.outputs import Completion

SHARED = "import os\n\n\ndef read_lines(path, encoding=None):\n    with open(path) as file:\n" * 3
PROMPTS = (
    SHARED + "        return file.readlines()\n",
    "class Stack:",
    "def main(argv=None):",
    SHARED + "        for line in file:\n",
    "x",
    "# Helper functions for the tests of the parser.\n" * 3,
    "import sys\n\n\nclass Reader(object):\n    def __init__(self, path):\n",
    SHARED + "\nclass Writer:",
)
SUFFIX = "\n\ndef "
NUM_FORKS = 4
FORK_EVERY = 5  # steps from one fork to the next

TIE = 2.0**-10
"""Of float32. A GPU may round the inputs of float32 products to 11 bits."""


class Calm:
    """A model, and prompts for it. mlx-lm, with one prompt at a time, is the calm run.

    Args:
        suffix: what half of the forks add to their prompt.
        max_tokens: of each answer.
        tie: two tokens are a tie if their logits differ by less than this part of their range.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[list[int]],
        suffix: list[int],
        max_tokens: int,
        tie: float,
    ) -> None:
        self.model, self.prompts, self.suffix = model, prompts, suffix
        self.max_tokens, self.tie = max_tokens, tie
        self.answer = cache(self._answer)

    def _answer(self, prompt: tuple[int, ...]) -> tuple[list[int], list[Array]]:
        """Greedy tokens, and for each the log-probabilities of all tokens."""
        steps = [*generate_step(mx.array(prompt), self.model, max_tokens=self.max_tokens)]
        rows = [np.array(row.astype(mx.float32)).ravel() for _, row in steps]
        return [int(token) for token, _ in steps], rows


@cache  # by number of tokens; two checks share the answers
def demo_model(max_tokens: int) -> Calm:
    """The demo model and prompts for it."""
    model, tokenizer = load_model()
    prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    return Calm(model, prompts, list(tokenizer.encode(SUFFIX)), max_tokens, TIE)


class Play:
    """Requests on an engine: they arrive one by one, and some fork while they run."""

    def __init__(self, engine: Engine, calm: Calm) -> None:
        self.engine = engine
        self._calm = calm
        self._prompts: dict[int, list[int]] = {}
        self.tokens = 0
        self.ties = 0
        self.wrong: list[str] = []
        self.num_wrong = 0  # requests with a wrong token

    def run(self) -> None:
        """Complete all prompts and NUM_FORKS forks; compare each with mlx-lm."""
        engine, waiting = self.engine, list(self._calm.prompts)
        forks_left = NUM_FORKS
        for step in count():
            if waiting and step % 2 == 0:
                prompt = waiting.pop(0)
                request_id = engine.add_request(prompt, max_tokens=self._calm.max_tokens)
                self._prompts[request_id] = prompt
            if not waiting and not engine.has_work:
                return
            running = []
            for output in engine.step():
                if output.completion is None:
                    running.append(output.request_id)
                else:
                    self._compare(output.completion)
            if running and forks_left and step % FORK_EVERY == 0:
                forks_left -= 1
                self._fork(running[-1], self._calm.suffix if forks_left % 2 else [])

    def _fork(self, parent: int, suffix: list[int]) -> None:
        child = self.engine.fork(parent, suffix, max_tokens=self._calm.max_tokens)
        request = self.engine.request(child)
        assert request is not None
        self._prompts[child] = list(request.tokens)

    def _compare(self, completion: Completion) -> None:
        name, prompt = completion.request_id, self._prompts[completion.request_id]
        want, rows = self._calm.answer(tuple(prompt))
        got = completion.tokens
        self.tokens += len(want)
        if completion.error is not None or len(got) != len(want):
            self.wrong.append(f"request {name} ends after {len(got)} tokens: {completion.error}")
        elif got != want:
            first = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
            row = rows[first]
            if row[want[first]] - row[got[first]] < self._calm.tie * np.ptp(row):
                self.ties += 1
            else:
                self.num_wrong += 1
                self.wrong.append(
                    f"request {name}, prompt of {len(prompt)} tokens: token {first} begins"
                    f" {got[first : first + 4]}, mlx-lm's {want[first : first + 4]}"
                )


def check_tokens(found: Findings, quick: bool) -> None:
    """tokens of the engine against mlx-lm's, on the demo model"""
    demo = demo_model(16 if quick else 40)
    engine = Engine(demo.model, num_blocks=512, prefill_chunk=24, max_running=6)
    play = Play(engine, demo)
    for _ in found.progress(range(2), "round"):  # the second one finds prefixes of the first
        play.run()
    report(found, play, engine, ("prefix_hit_tokens", "cow_clones"))


def check_order(found: Findings, quick: bool) -> None:
    """reads and writes of a pool in a busy engine against a calm run"""
    rewrite_pool(found, rounds=20 if quick else 80)
    demo = demo_model(16 if quick else 40)
    for chunk in found.progress((7,) if quick else (7, 16, 48), "engine"):
        engine = Engine(
            demo.model, block_size=8, num_blocks=22 if quick else 36, prefill_chunk=chunk
        )
        play = Play(engine, demo)
        play.run()
        report(found, play, engine, ("preemptions", "cow_clones"))


def report(found: Findings, play: Play, engine: Engine, events: Sequence[str]) -> None:
    """Write down a play; it must have met each of `events`, which are counters of the engine, and
    steps of prompt chunks alone."""
    counts = {event: int(getattr(engine.stats, event)) for event in events}
    counts["chunk_only_steps"] = sum(
        tick.prefill_tokens > 0 and tick.decode_tokens == 0 for tick in engine.ticks
    )
    numbers = {"tokens": play.tokens, "ties": play.ties, "steps": engine.stats.steps, **counts}
    found.numbers.setdefault("plays", []).append(numbers)
    found.failures += play.wrong
    found.num_wrong += play.num_wrong
    found.failures += [f"the engine met no {name}" for name, number in counts.items() if not number]
    found.lines.append(
        ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in numbers.items())
    )


def rewrite_pool(found: Findings, rounds: int) -> None:
    """Write a whole pool, attend over it, copy blocks in it, and again, while the device still
    computes the rounds before. Keys and values of a round are one number, and so is its output."""
    num_blocks, size, heads, dim = 65, 16, 8, 128
    pool = KVPool([KVShape(heads, dim, dim, mx.float32)], num_blocks, size)
    slots = as_int32(range((num_blocks - 1) * size))
    tables = mx.broadcast_to(mx.arange(num_blocks, dtype=mx.int32), (4, num_blocks))
    lens = as_int32([num_blocks * size] * 4)
    q = mx.random.normal((4, 4 * heads, 1, dim), key=mx.random.key(0))
    outputs = []
    for number in range(rounds):
        rows = mx.full((slots.size, heads, dim), float(number % 8))
        pool.write(0, rows, rows, slots)
        pool.copy_blocks([BlockCopy(number % (num_blocks - 1), num_blocks - 1)])
        outputs.append(ops.paged_attention(q, pool.k, pool.v, tables, lens))
        mx.async_eval(outputs[-1], pool.handles())  # type: ignore[no-untyped-call]
    errors = [np.abs(np.array(out) - number % 8).max() for number, out in enumerate(outputs)]
    largest = 1e-4 if ops.kernel_for() == "native" else 0.1  # plain MLX may multiply in TF32
    wrong = [number for number, error in enumerate(errors) if not error <= largest]
    found.numbers["rewritten"] = rounds
    found.lines.append(f"pool rewritten {rounds} times while it was read")
    if wrong:
        found.num_wrong += len(wrong)
        found.failures.append(f"rounds {wrong[:8]} read what other rounds wrote")
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pool.write(0, rows[:1], rows[:1], slots[:1])
    mx.eval(pool.handles())
    grown = mx.get_peak_memory() - before
    if ops.kernel_for() == "native" and not ops.plain and grown > pool.nbytes // 4:
        found.failures.append(
            f"a write of one token took {grown} bytes: expected no copy of a pool"
        )
