"""Whether anything grows while an engine serves many small requests of all kinds.

    python -m scripts.soak --requests 20000

Requests arrive whether or not others have ended, `--per-step` of them in each step on average. The
ceiling: nothing grows, no step gets slower. The last line is one JSON object.
"""

import argparse
import gc
import json
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from bench.command import MIB, add_model
from bench.models import SIZES, llama_model
from mlx_paged import Engine, SamplingParams
from mlx_paged.cli import Parser, number
from mlx_paged.metrics.stats import resident_bytes

LEAST_BLOCKS = 16
"""They hold the longest request: a prompt of 75 tokens, 15 outputs, and a fork of all that."""

PREFIXES = 40  # beginnings of prompts, such as system prompts, that requests share
HISTORIES = 64  # conversations that later requests may continue
KEPT = 8  # ended requests whose blocks are held for forks at a time
ABORTED = 0.05  # part of the requests that are aborted


Footprint = dict[str, float]
"""What the process holds and how fast it is, at the end of a tenth of the requests.

"waiting" requests are not admitted: few if the engine can serve the load. "objects" are those that
Python's garbage collector tracks. "step_ms" is the median over the tenth.
"""


class Soak:
    """Random requests on one engine: single ones, samples, further turns, forks, aborts."""

    def __init__(self, engine: Engine, vocab: int, rng: np.random.Generator) -> None:
        self.engine = engine
        self.vocab = vocab
        self.rng = rng
        self.num_added = self.num_ended = self.num_tokens = self.num_aborts = 0
        self.cached_tokens = 0
        self.step_seconds: list[float] = []
        self._prefixes = [self._tokens(int(n)) for n in rng.integers(1, 40, PREFIXES)]
        self._histories: deque[list[int]] = deque(maxlen=HISTORIES)
        self._keeps: set[int] = set()  # requests under way that will be kept
        self._kept: deque[int] = deque()
        self._prompts: dict[int, list[int]] = {}  # of requests under way
        self._aborts: dict[int, int] = {}  # steps left, by request id

    def arrive(self, count: int) -> None:
        """Add at least so many requests."""
        while count > 0:
            count -= self._add()

    def step(self) -> None:
        """One step, and what callers do after it."""
        start = time.perf_counter()
        outputs = self.engine.step()
        self.step_seconds.append(time.perf_counter() - start)
        for output in outputs:
            if output.completion is not None:
                self._end(output.request_id, output.completion.tokens)
                self.cached_tokens += output.completion.cached_prompt_tokens
        for request_id, steps_left in list(self._aborts.items()):
            self._aborts[request_id] = steps_left - 1
            if steps_left == 0 and (done := self.engine.abort(request_id)) is not None:
                self.num_aborts += 1
                self._end(request_id, done.tokens)

    def release(self) -> None:
        """Release all kept requests."""
        while self._kept:
            self.engine.release(self._kept.popleft())

    def footprint(self) -> Footprint:
        """At the end of a tenth; the next tenth begins."""
        gc.collect()
        footprint = {
            "waiting": len(self.engine.scheduler.waiting),
            "rss_mib": round(resident_bytes() / MIB, 2),
            "mlx_active_bytes": mx.get_active_memory(),
            "mlx_cache_bytes": mx.get_cache_memory(),
            "objects": len(gc.get_objects()),
            "step_ms": round(1000 * median(self.step_seconds), 3),
        }
        self.step_seconds.clear()
        return footprint

    def _add(self) -> int:
        prompt, params = self._prompt(), self._params()
        kind = self.rng.random()
        if kind < 0.1:
            ids = self.engine.add_samples(prompt, int(self.rng.integers(2, 5)), params)
        elif kind < 0.2 and self._kept:
            parent = self._kept[0]
            ids = [self.engine.fork(parent, prompt[-4:], params)]
        else:
            keep = bool(kind > 0.9)
            ids = [self.engine.add_request(prompt, params, keep=keep)]
            self._keeps |= set(ids) if keep else set()
        for request_id in ids:
            self._prompts[request_id] = prompt
            if self.rng.random() < ABORTED:
                self._aborts[request_id] = int(self.rng.integers(0, 8))
        self.num_added += len(ids)
        return len(ids)

    def _end(self, request_id: int, tokens: list[int]) -> None:
        self.num_ended += 1
        self.num_tokens += len(tokens)
        self._aborts.pop(request_id, None)
        self._histories.append((self._prompts.pop(request_id) + tokens)[:64])
        if request_id in self._keeps:
            self._keeps.remove(request_id)
            self._kept.append(request_id)
        if len(self._kept) > KEPT:
            self.engine.release(self._kept.popleft())

    def _prompt(self) -> list[int]:
        if self._histories and self.rng.random() < 0.3:
            known = self._histories[int(self.rng.integers(len(self._histories)))]
        else:
            known = self._prefixes[int(self.rng.integers(PREFIXES))]
        return known + self._tokens(int(self.rng.integers(1, 12)))

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(self.vocab, size=count).tolist()
        return tokens

    def _params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=int(self.rng.integers(1, 16)),
            temperature=float(self.rng.choice((0.0, 1.0))),
            top_p=float(self.rng.choice((1.0, 0.9))),
            stop_token_ids=frozenset(self._tokens(1)),
        )


def run(soak: Soak, num_requests: int, per_step: float) -> list[Footprint]:
    """Serve `num_requests`, or a few more; a footprint after every tenth of them."""
    footprints: list[Footprint] = []
    with tqdm(total=num_requests, unit="request", mininterval=1) as progress:
        while soak.num_added < num_requests or soak.engine.has_work:
            room = num_requests - soak.num_added
            soak.arrive(min(room, int(soak.rng.poisson(per_step))))
            ended = soak.num_ended
            soak.step()
            progress.update(soak.num_ended - ended)
            if soak.num_ended >= num_requests * (len(footprints) + 1) / 10:
                footprints.append(soak.footprint())
                text = ", ".join(f"{name} {value:.10g}" for name, value in footprints[-1].items())
                tqdm.write(f"tenth {len(footprints)}: {text}")
    return footprints


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="scripts.soak", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    at_least_ten = number(int, 10, 2**31, "a whole number >= 10")
    add("--requests", type=at_least_ten, default=20_000)
    rate = number(float, 0.01, 100, "a number from 0.01 to 100")
    add("--per-step", type=rate, default=1.25, help="requests that come in a step")
    blocks = number(int, LEAST_BLOCKS, 2**31, f"a whole number >= {LEAST_BLOCKS}")
    add("--num-blocks", type=blocks, default=96, help="of 8 tokens, in the pool")
    add_model(parser, default="tiny")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Returns what the last line says; growth is from the end of the first tenth to the last's."""
    args = parse(argv)
    engine = Engine(
        llama_model(args.model),
        block_size=8,
        num_blocks=args.num_blocks,
        prefill_chunk=128,
        seed=args.seed,
    )
    soak = Soak(engine, SIZES[args.model]["vocab_size"], np.random.default_rng(args.seed))
    start = time.perf_counter()
    footprints = run(soak, args.requests, args.per_step)
    seconds = time.perf_counter() - start
    soak.release()
    engine.manager.check_integrity()

    first, last = footprints[0], footprints[-1]
    report: dict[str, float] = {
        "requests": soak.num_ended,
        "tokens": soak.num_tokens,
        "aborts": soak.num_aborts,
        "preemptions": engine.stats.preemptions,
        "cached_tokens": soak.cached_tokens,
        "seconds": round(seconds, 1),
        "rss_growth_mb": round(last["rss_mib"] - first["rss_mib"], 2),
        "active_growth_bytes": last["mlx_active_bytes"] - first["mlx_active_bytes"],
        "object_growth": last["objects"] - first["objects"],
        "step_ms_first_tenth": first["step_ms"],
        "step_ms_last_tenth": last["step_ms"],
        "ratio": round(last["step_ms"] / first["step_ms"], 3),
        "leaked_blocks": engine.manager.blocks_in_use,
    }
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main()
