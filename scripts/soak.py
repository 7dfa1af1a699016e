"""Whether anything grows while an engine serves many small requests of all kinds.

    python -m scripts.soak --requests 20000
    python -m scripts.soak --model DIR --requests 500 --per-step 0.5 --num-blocks 512

A directory of a chat model gets chats instead of random tokens. Requests arrive whether or not
others have ended, `--per-step` of them in each step on average. The ceiling: nothing grows, no step
gets slower. The last line is one JSON object.
"""

import argparse
import gc
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from bench.command import MIB
from bench.models import llama_model
from bench.names import SIZES
from mlx_paged import Engine, SamplingParams
from mlx_paged.cli import Parser, number
from mlx_paged.loading import load_model
from mlx_paged.metrics.stats import resident_bytes

BLOCK_SIZE = 8
LEAST_BLOCKS = {"tokens": 16, "chats": 64}
"""They hold the longest request: 75 tokens, 15 outputs, and a fork of all that; in chats a history
of 192 tokens, a question of up to 100, 48 outputs, and a fork of all that."""

PREFIXES = 40  # beginnings of prompts, such as system prompts, that requests share
HISTORIES = 64  # conversations that later requests may continue
KEPT = 8  # ended requests whose blocks are held for forks at a time
ABORTED = 0.05  # part of the requests that are aborted


Footprint = dict[str, float]
"""What the process holds and how fast it is, at the end of a tenth of the requests.

"waiting" requests are not admitted: few if the engine can serve the load. "objects" are those that
Python's garbage collector tracks. "step_ms" is the median over the tenth.
"""


TOPICS = ("rivers", "prime numbers", "the moon", "tea", "paper", "old maps", "bees", "a lighthouse")
QUESTIONS = (
    "Tell me {number} facts about {topic}.",
    "Write a poem of {number} lines about {topic}.",
    "What is {number} times 17, and what has that to do with {topic}?",
    "¿Qué sabes de {topic}? Responde en {number} frases.",
    "Schreibe {number} Sätze über {topic}.",
    "用{number}句话介绍 {topic}。",
    "Write a Python function that counts {topic} and stops at {number}.",
    "Why do people like {topic}? Give {number} reasons, then ask me a question.",
)


class Soak:
    """Random requests on one engine: single ones, samples, further turns, forks, aborts."""

    max_tokens = 15
    history_tokens = 64

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
        self._histories.append((self._prompts.pop(request_id) + tokens)[: self.history_tokens])
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
            max_tokens=int(self.rng.integers(1, self.max_tokens + 1)),
            temperature=float(self.rng.choice((0.0, 1.0))),
            top_p=float(self.rng.choice((1.0, 0.9))),
            stop_token_ids=frozenset(self._tokens(1)),
        )


class Chats(Soak):
    """The same kinds of requests, as chats: a question, or one more behind an earlier chat."""

    max_tokens = 48
    history_tokens = 192

    def __init__(
        self, engine: Engine, tokenizer: TokenizerWrapper, rng: np.random.Generator
    ) -> None:
        super().__init__(engine, len(tokenizer), rng)
        self._tokenizer = tokenizer

    def _prompt(self) -> list[int]:
        known: list[int] = []
        if self._histories and self.rng.random() < 0.3:
            known = self._histories[int(self.rng.integers(len(self._histories)))]
        form, topic = self.rng.choice(QUESTIONS), self.rng.choice(TOPICS)
        question = str(form).format(number=self.rng.integers(2, 100), topic=topic)
        messages = [{"role": "user", "content": question}]
        tokens: list[int] = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True
        )
        return known + tokens


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
    add("--num-blocks", type=int, default=96, help=f"of {BLOCK_SIZE} tokens, in the pool")
    text = f"shape of a random model ({', '.join(SIZES)}), or the directory of a chat model"
    add("--model", default="tiny", metavar="NAME", help=text)
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.model not in SIZES and not Path(args.model).is_dir():
        names = ", ".join(SIZES)
        parser.error(f"argument --model: expected {names} or a directory, got {args.model!r}")
    least = LEAST_BLOCKS["tokens" if args.model in SIZES else "chats"]
    if args.num_blocks < least:
        given = f"got {args.num_blocks}"
        parser.error(f"argument --num-blocks: expected a whole number >= {least}, {given}")
    return args


def soak_of(args: argparse.Namespace) -> Soak:
    """Raises ValueError if the model cannot be loaded, or has no chat template."""
    options = {"block_size": BLOCK_SIZE, "num_blocks": args.num_blocks, "seed": args.seed}
    rng = np.random.default_rng(args.seed)
    if args.model in SIZES:
        engine = Engine(llama_model(args.model), prefill_chunk=128, **options)
        return Soak(engine, SIZES[args.model]["vocab_size"], rng)
    model, tokenizer = load_model(args.model)
    if not tokenizer.has_chat_template:
        raise ValueError(f"--model {args.model}: expected a model with a chat template")
    return Chats(Engine(model, tokenizer, prefill_chunk=128, **options), tokenizer, rng)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Returns what the last line says; growth is from the end of the first tenth to the last's."""
    args = parse(argv)
    try:
        soak = soak_of(args)
    except ValueError as error:
        print(f"scripts.soak: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    engine = soak.engine
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
