"""Do models with sliding windows compute in the engine what they compute in mlx-lm?

    python -m scripts.windowed_parity
    python -m scripts.windowed_parity --names gemma3 gpt_oss --windows 8 --chunks 7 --block-sizes 16

Every windowed architecture runs as a tiny model through every scenario below, with all these
windows, prefill chunks and block sizes. Greedy tokens must be those of mlx-lm's `generate_step`.
All log-probabilities must be those that `generate_step` has for the same tokens. Failures are
printed with the command that repeats them. The last line is one JSON object.
"""

import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from mlx_paged import Completion, Engine
from mlx_paged.attention.causal import FULL
from mlx_paged.cli import COUNT, Parser
from mlx_paged.options import checked_bits
from mlx_paged.runner.model_probe import probe
from tests.support.models.architectures import VOCAB
from tests.support.models.windowed_reference import Reference, Rows, Tokens

Done = list[tuple[Tokens, Completion, bool]]
"""Prompts, their completions and whether these are greedy."""

WINDOWS = (8, 20, 64)
CHUNKS = (7, 64, 512)
BLOCK_SIZES = (5, 8, 16, 32)
NUM_TOKENS = 20
POOL_TOKENS = 4096
"""More than any scenario stores, so that nothing is preempted or evicted."""

TOLERANCE = 1e-4
"""Largest difference of log-probabilities, relative to the largest of them."""

QUANTIZED_TOLERANCE = 5e-3
"""The same where K/V is quantized: elements that differ in the last bit may be rounded apart."""

MOST_ROUNDED = 0.5
"""At most this part of the completions has such an element; the others keep `TOLERANCE`."""

NAMES = (
    "afmoe", "baichuan_m1", "baichuan_m1, windows only", "cohere2", "exaone4", "exaone_moe", "gear",
    "gear, soft-capped scores", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text",
    "gemma4_text, keys as values", "gemma4_text, windows only", "gpt_oss", "iquestloopcoder",
    "laguna", "llama, windowed", "llama4", "mellum", "mimo_v2_flash",
    "mimo_v2_flash, sinks everywhere", "ministral3", "mistral3", "muse_glimmer",
    "muse_glimmer, windows only", "olmo3", "recurrent_gemma", "spark2_5", "step3p5",
)  # fmt: skip
"""All tiny models of `tests.support.models.architectures` with a windowed layer that the
engine runs."""

SCENARIOS = (
    "arrivals", "preemptions", "forks", "samples", "beams", "prefixes", "evictions",
    "aborts", "next_turns",
)  # fmt: skip
"""Methods of :class:`Scenarios`."""


@dataclass(frozen=True)
class Case:
    """A model and the sizes with which it runs."""

    name: str
    window: int
    prefill_chunk: int
    block_size: int


class Scenarios:
    """The scenarios of one case. Each raises AssertionError if something differs from mlx-lm."""

    def __init__(self, reference: Reference, case: Case) -> None:
        self.reference = reference
        self.case = case
        self.counts: Counter[str] = Counter()
        self._rng = np.random.default_rng(0)

    def arrivals(self) -> None:
        """Prompts shorter and longer than the window arrive while others decode. The pool is small,
        so that blocks are used again soon."""
        window, block_size = self.case.window, self.case.block_size
        lengths = (2 * window + 3, 3, window - 3, window, window + 1, 4 * window + 1)
        prompts = [self.prompt(length) for length in lengths]
        blocks = [-(-(len(prompt) + NUM_TOKENS) // block_size) for prompt in prompts]
        engine = self.engine(num_blocks=max(blocks) + sum(blocks) // 3, prefix_cache=False)
        arrivals = {0: prompts[:2], 2: prompts[2:4], 5: prompts[4:]}
        self.check(engine, self.run(engine, arrivals))

    def preemptions(self) -> None:
        """A pool that cannot hold all sequences to their ends."""
        window, block_size = self.case.window, self.case.block_size
        lengths = (window // 2, window - 1, window, window + 3, 2 * window + 1)
        prompts = [self.prompt(length) for length in lengths]
        num_tokens = window // 2 + 2 * block_size
        blocks = [-(-(len(prompt) + num_tokens) // block_size) for prompt in prompts]
        for num_blocks in range(sum(blocks) * 2 // 3, 1, -1 - sum(blocks) // 12):
            engine = self.engine(num_blocks=num_blocks)
            try:
                done = self.run(engine, {0: prompts}, max_tokens=num_tokens)
            except ValueError:  # too small for the longest prompt
                break
            self.check(engine, done)
            self.counts["preemptions"] += engine.stats.preemptions
            if engine.stats.preemptions:
                return
        if FULL in probe(self.reference.model).sees:
            raise AssertionError("no pool was so small that a sequence was preempted")

    def forks(self) -> None:
        """Children of a sequence in its prompt, in its decodes and after its end, and their own."""
        engine = self.engine()
        prompt = self.prompt(2 * self.case.window + 3)
        prompts: dict[int, Tokens] = {}
        texts: dict[int, list[int]] = {}  # of ended requests
        done: Done = []

        def fork(parent: int, length: int, **options: Any) -> int:
            child = engine.fork(parent, self.prompt(length), keep=True, **self.options(**options))
            request = engine.request(child)
            assert request is not None
            prompts[child] = list(request.tokens)
            num_generated = len(request.tokens) - length - len(prompt)
            own = texts.get(parent) or [*prompt, *self.reference.greedy(prompt, num_generated)]
            stem = request.tokens[: len(request.tokens) - length]
            assert stem == own, "the parent's tokens differ from mlx-lm's"
            return child

        def finish(greedy: bool) -> None:
            for request_id, completion in self.steps(engine).items():
                texts[request_id] = [*prompts[request_id], *completion.tokens]
                done.append((prompts[request_id], completion, greedy))

        parent = engine.add_request(prompt, keep=True, **self.options())
        prompts[parent] = prompt
        engine.step()
        fork(parent, 3)
        while len(getattr(engine.request(parent), "tokens", ())) < len(prompt) + 4:
            engine.step()
        fork(parent, 1)
        finish(greedy=True)
        for length in (1, 4, self.case.window + 3):
            child = fork(parent, length)
        finish(greedy=True)
        fork(child, 2)
        finish(greedy=True)
        for seed in range(3):
            fork(child, 0, temperature=2.0, seed=seed)
        finish(greedy=False)
        assert len({tuple(completion.tokens) for _, completion, _ in done[-3:]}) >= 2
        self.counts["forks"] += len(done) - 1
        for request_id in prompts:
            engine.release(request_id)
        self.check(engine, done)

    def samples(self) -> None:
        """Samples of a short and of a long prompt; the first one of each is aborted on the way."""
        engine = self.engine()
        prompts: dict[int, Tokens] = {}
        for length in (self.case.window // 2, 3 * self.case.window + 2):
            prompt = self.prompt(length)
            options = self.options(temperature=2.0, seed=5)
            prompts |= dict.fromkeys(engine.add_samples(prompt, 4, **options), prompt)
        self.steps(engine, 3)
        aborted = [engine.abort(list(prompts)[i]) for i in (0, -1)]
        done = self.steps(engine)
        assert len({tuple(completion.tokens) for completion in done.values()}) >= 4
        self.counts["samples"] += len(done)
        done |= {completion.request_id: completion for completion in aborted if completion}
        self.check(engine, [(prompts[i], completion, False) for i, completion in done.items()])

    def beams(self) -> None:
        """Each hypothesis of a beam search has the log-probabilities of its tokens in mlx-lm."""
        engine = self.engine()
        for length in (self.case.window - 2, 3 * self.case.window + 1):
            prompt = self.prompt(length)
            completion = engine.beam_search(prompt, 3, max_tokens=10)
            assert len({tuple(beam.tokens) for beam in completion.beams}) == 3
            for beam in completion.beams:
                rows = self.reference.logprobs(prompt, beam.tokens)
                own = rows[np.arange(len(beam.tokens)), beam.tokens]
                self.assert_near(np.array(beam.logprobs), own, rows)
                self.counts["beams"] += 1
        self.check(engine, [])

    def prefixes(self) -> None:
        """Prompts that begin like an earlier one. What they share ends within the window and behind
        it, as seen from its start and from its end."""
        self._share_prefixes(self.engine(), must_hit=not self.reference.recurrent)

    def evictions(self) -> None:
        """The same in a pool for about one sequence: cached blocks are evicted and used again."""
        longest = 5 * self.case.window + 2 + NUM_TOKENS
        engine = self.engine(num_blocks=longest // self.case.block_size + 3)
        self._share_prefixes(engine, must_hit=False)
        self.counts["evictions"] += engine.stats.evictions

    def _share_prefixes(self, engine: Engine, must_hit: bool) -> None:
        window = self.case.window
        first = self.prompt(4 * window + 2)
        self.check(engine, self.run(engine, {0: [first]}))
        for shared in (window // 2, window + 2, 2 * window, 4 * window - 1, 4 * window + 2):
            prompts = [first[:shared] + self.prompt(length) for length in (5, window)]
            done = self.run(engine, {0: prompts})
            for _, completion, _ in done:
                self.counts["cached_tokens"] += completion.cached_prompt_tokens
                if shared >= self.case.block_size and must_hit:
                    assert completion.cached_prompt_tokens > 0, f"{shared} tokens were not shared"
            self.check(engine, done)

    def aborts(self) -> None:
        """Sequences end in their prompts and in their decodes; others take their blocks."""
        engine = self.engine()
        lengths = (4 * self.case.window, self.case.window, 3, 2 * self.case.window + 1)
        prompts = {engine.add_request(p, **self.options()): p for p in map(self.prompt, lengths)}
        done: dict[int, Completion] = {}
        for victim in list(prompts)[:3]:
            done |= self.steps(engine, 3)
            completion = engine.abort(victim)
            assert completion is None or completion.finish_reason == "abort"
            done |= {victim: completion} if completion else {}
            prompt = self.prompt(self.case.window + 5)
            prompts[engine.add_request(prompt, **self.options())] = prompt
            self.counts["aborts"] += completion is not None
        done |= self.steps(engine)
        assert done.keys() == prompts.keys()
        self.check(engine, [(prompts[i], completion, True) for i, completion in done.items()])

    def next_turns(self) -> None:
        """Two conversations of three turns."""
        engine = self.engine()
        chats = [self.prompt(2 * self.case.window), self.prompt(5)]
        for turn in range(3):
            done = self.run(engine, {0: chats})
            for prompt, completion, _ in done:
                self.counts["cached_tokens"] += completion.cached_prompt_tokens
                if turn and len(prompt) > 2 * self.case.block_size:
                    assert completion.cached_prompt_tokens > 0, f"turn {turn} begins anew"
            self.check(engine, done)
            chats = [[*prompt, *c.tokens, *self.prompt(4)] for prompt, c, _ in done]

    # What the scenarios share

    def prompt(self, length: int) -> list[int]:
        """Other tokens in each call."""
        return [int(token) for token in self._rng.integers(0, VOCAB, length)]

    def options(self, **options: Any) -> dict[str, Any]:
        return {"max_tokens": NUM_TOKENS, "logprobs": VOCAB} | options

    def engine(self, **options: Any) -> Engine:
        size = self.case.block_size
        sizes: dict[str, Any] = {"prefill_chunk": self.case.prefill_chunk, "block_size": size}
        sizes["num_blocks"] = POOL_TOKENS // size
        sizes["kv_bits"] = self.reference.kv_bits
        return Engine(self.reference.model, **sizes | options)

    def steps(self, engine: Engine, num_steps: int | None = None) -> dict[int, Completion]:
        """Steps up to a number or to the last one: completions by request."""
        done: dict[int, Completion] = {}
        while engine.has_work and num_steps != 0:
            done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
            num_steps = None if num_steps is None else num_steps - 1
        return done

    def run(self, engine: Engine, arrivals: dict[int, list[list[int]]], **options: Any) -> Done:
        """Greedy requests that arrive before the given steps, in the order of their arrival."""
        prompts: dict[int, Tokens] = {}
        done: dict[int, Completion] = {}
        for before in range(max(arrivals) + 1):
            for prompt in arrivals.get(before, ()):
                prompts[engine.add_request(prompt, **self.options(**options))] = prompt
            done |= self.steps(engine, 1)
        done |= self.steps(engine)
        return [(prompt, done[request_id], True) for request_id, prompt in prompts.items()]

    def check(self, engine: Engine, done: Done) -> None:
        """Completions (greedy or not) are mlx-lm's; no sequence holds a block any more."""
        for prompt, completion, greedy in done:
            assert completion.error is None, completion.error
            assert completion.tokens or completion.finish_reason == "abort"
            if completion.tokens:
                self._compare(prompt, completion, greedy)
        engine.manager.check_integrity()
        assert engine.manager.blocks_in_use == 0

    def assert_near(self, found: Rows, own: Rows, rows: Rows, others: Iterable[Rows] = ()) -> None:
        """`found` is `own`, or, if K/V is quantized, far from it but near one of `others`."""

        def difference(one: Rows) -> float:
            return float(np.abs(found - one).max() / np.abs(rows).max())

        error = difference(own)
        limit = TOLERANCE if self.reference.kv_bits is None else QUANTIZED_TOLERANCE
        if error >= limit and self.reference.kv_bits is not None:
            is_near = any(difference(one) < TOLERANCE for one in others)
            self.counts["apart"] += is_near
            limit = np.inf if is_near else limit
        assert error < limit, f"log-probabilities differ by {error:.2g} of the largest"
        self.counts["compared"] += 1
        self.counts["rounded"] += error >= TOLERANCE

    def _compare(self, prompt: Tokens, completion: Completion, greedy: bool) -> None:
        tokens = completion.tokens
        own = self.reference.logprobs(prompt, tokens)
        found = np.empty_like(own)
        for row, top in zip(found, completion.top_logprobs, strict=True):
            ids, logprobs = zip(*top, strict=True)
            row[list(ids)] = logprobs
        self.assert_near(found, own, own, self.reference.noisy_logprobs(prompt, tokens))
        self.counts["tokens"] += len(tokens)
        expected = self.reference.greedy(prompt, len(tokens)) if greedy else tokens
        if tokens != expected:
            chosen = own[np.arange(len(tokens)), tokens]
            near = TOLERANCE if self.reference.kv_bits is None else QUANTIZED_TOLERANCE
            limit = own.max(axis=-1) - near * np.abs(own).max()
            are_likeliest = (found.argmax(axis=-1) == tokens).all()
            assert are_likeliest and (chosen >= limit).all(), f"{tokens}, expected {expected}"
            self.counts["near_ties"] += 1


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="scripts.windowed_parity", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--names", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="models")
    add("--windows", nargs="+", type=COUNT, default=WINDOWS, metavar="W", help="tokens seen")
    add("--chunks", nargs="+", type=COUNT, default=CHUNKS, metavar="C", help="prefill chunks")
    add("--block-sizes", nargs="+", type=COUNT, default=BLOCK_SIZES, metavar="B")
    add("--kv-bits", metavar="8|6|4", help="of the engine, and of K/V in mlx-lm by NumPy")
    args = parser.parse_args(argv)
    kv_bits = checked_bits("scripts.windowed_parity", args.kv_bits)
    of_bits = "" if kv_bits is None else f" --kv-bits {kv_bits}"
    totals: Counter[str] = Counter(scenarios=0, failures=0, near_ties=0)
    for name, window in product(args.names, args.windows):
        start, before = time.perf_counter(), totals["failures"]
        reference = Reference(name, window, kv_bits)
        for chunk, block_size in product(args.chunks, args.block_sizes):
            scenarios = Scenarios(reference, Case(name, window, chunk, block_size))
            for scenario in SCENARIOS:
                totals["scenarios"] += 1
                try:
                    getattr(scenarios, scenario)()
                except Exception:
                    totals["failures"] += 1
                    print(f"{scenario} fails.", traceback.format_exc(limit=-1).rstrip())
                    sizes = f"--windows {window} --chunks {chunk} --block-sizes {block_size}"
                    print(f"python -m scripts.windowed_parity --names '{name}' {sizes}{of_bits}")
            totals.update(scenarios.counts)
        seconds, failures = time.perf_counter() - start, totals["failures"] - before
        print(f"{name}, window {window}: {failures} failures, {seconds:.0f} s", flush=True)
    if totals["rounded"] > MOST_ROUNDED * totals["compared"]:
        totals["failures"] += 1
        print(f"{totals['rounded']} of {totals['compared']} completions differ from mlx-lm's")
    print(json.dumps(totals))
    return int(totals["failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
