"""What drafts are worth: engines with and without them take turns under the same requests.

Each engine runs for a quarter of a second at a time, so that other processes slow all of them
alike. Fixed depths show whether the planner chooses well.

    python -m scripts.speculation --preset copy --active 1 8 32 --engines ngram fixed2 fixed4
    python -m scripts.speculation --preset chat --model DIR/4bit --active 1 4 16
    python -m scripts.speculation --preset chat --model DIR --draft-head HEAD --engines head both

The presets of `scripts.real_jobs` need a chat model, such as `scripts.real_model` makes. Their
answers end where the model ends them; those of "forced-edit" are the edited files.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import numpy as np

from bench.command import make_parser, print_result, table
from bench.flags.presets import PRESETS
from bench.machine import check_machine, machine_text
from bench.models import first_layers, one_random_layer
from bench.serving.engines import load_model
from bench.serving.trace import Job
from bench.serving.workload import make_jobs
from bench.stalls import Round, Server, play, summary
from mlx_paged import Engine
from mlx_paged.cli import COUNT, MILLISECONDS
from mlx_paged.loading import load_model as load_chat_model
from mlx_paged.request import Request
from scripts.real_jobs import JOBS, Forced, tasks

SLICE_SECONDS = 0.25
FIXED = "fixed"


@dataclass
class Contender:
    """An engine and what it did with all requests of the trace.

    Attributes:
        decode_seconds: of the steps that computed no prompt token.
        decode_tokens: that came out of these.
    """

    name: str
    engine: Engine
    outputs: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    steps: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0

    def run(self, seconds: float) -> None:
        """Step for so long, or until the end."""
        stop = self.seconds + seconds
        while self.engine.has_work and self.seconds < stop:
            prompts = self.engine.stats.prompt_tokens
            started = time.perf_counter()
            outputs = self.engine.step()
            spent = time.perf_counter() - started
            self.seconds += spent
            self.steps += 1
            for output in outputs:
                assert output.token is not None
                self.outputs.setdefault(output.request_id, []).append(output.token)
            if self.engine.stats.prompt_tokens == prompts:
                self.decode_seconds += spent
                self.decode_tokens += len(outputs)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs.values()))

    def row(self, plain: "Contender") -> dict[str, Any]:
        drafts, right = self.engine.stats.drafts, self.engine.stats.accepted_drafts
        rate, decodes = self.tokens / self.seconds, self.decode_tokens / self.decode_seconds
        same = sum(a == b for a, b in zip(self.texts, plain.texts, strict=True))
        return {
            "tokens_per_sec": round(rate, 1),
            "ratio": round(rate / (plain.tokens / plain.seconds), 3),
            "decode_ratio": round(decodes * plain.decode_seconds / plain.decode_tokens, 3),
            "steps": self.steps,
            "drafts": drafts,
            "right": round(right / drafts, 3) if drafts else None,
            "rows_per_step": round((self.tokens + drafts - right) / self.steps, 2),
            "same_outputs": same,
            "by_depth": [
                round(good / count, 3) for count, good in self.engine.stats.drafts_by_depth if count
            ][:4],
        }

    @property
    def texts(self) -> list[list[int]]:
        return [self.outputs[key] for key in sorted(self.outputs)]


def make_engine(name: str, model: nn.Module, layers: int, **options: Any) -> Engine:
    """plain, ngram, fixedN (n-grams, always N of them), draft (the model's own first layers),
    useless (one random layer), head, or both (a head and n-grams)."""
    head = options.pop("draft_head", None)
    if name == "plain":
        return Engine(model, **options)
    if name in ("head", "both"):
        return Engine(
            model, draft_head=head, speculate="ngram" if name == "both" else None, **options
        )
    if name in ("draft", "useless"):
        vocab = model.args.vocab_size
        small = first_layers(model, layers) if name == "draft" else one_random_layer(vocab)
        return Engine(model, draft_model=small, **options)
    engine = Engine(model, speculate="ngram", **options)
    if name != "ngram":
        depth = int(name.removeprefix(FIXED))
        speculation: Any = engine.scheduler.decoding
        speculation._depths = always(depth)
    return engine


def always(depth: int) -> Callable[[dict[Request, tuple[float, ...]]], dict[Request, int]]:
    """What replaces the planner: so many drafts for each request that has a guess."""

    def depths(likely: dict[Request, tuple[float, ...]]) -> dict[Request, int]:
        able = [request for request, shares in likely.items() if shares and shares[0] > 0]
        left = {r: r.params.max_tokens - r.num_generated - 1 for r in able}
        return {request: min(depth, count) for request, count in left.items() if count > 0}

    return depths


def race(contenders: list[Contender], jobs: list[Job], ignore_eos: bool) -> None:
    """All requests on all engines, in slices."""
    for each in contenders:
        for job in jobs:
            each.engine.add_request(
                list(job.prompt), max_tokens=job.max_tokens, ignore_eos=ignore_eos
            )
    while any(each.engine.has_work for each in contenders):
        for each in contenders:
            each.run(SLICE_SECONDS)


def measure_stalls(model: nn.Module, vocab: int, active: int, bound_ms: float) -> None:
    """A prompt of 6000 tokens arrives while streams copy their prompts: gaps between the steps in
    which a stream got tokens, without drafts and with n-grams, both within the bound."""
    preset = replace(PRESETS["copy"], draw=lambda rng, n: (np.full(n, 1500), np.full(n, 1400)))
    streams = [list(job.prompt) for job in make_jobs(preset, vocab, 0, active)]
    warm_up, long = (make_jobs(preset, vocab, seed, 1)[0].prompt for seed in (1, 2))
    scenario: Any = SimpleNamespace(
        streams=streams, warm_up=list(warm_up), long=[*long] * 4, stream_max_tokens=1400
    )
    options: dict[str, Any] = {"max_kv_tokens": 3200 * active + 10_000, "max_running": active + 1}
    rows = {}
    for name, speculate in {"plain": None, "ngram": "ngram"}.items():
        engine = Engine(model, max_stall_ms=bound_ms, speculate=speculate, **options)
        played: Round = play(Server(engine), scenario)
        rows[name] = summary([played], bound_ms, bound_ms) | {"drafts": engine.stats.drafts}
        print(f"{name}: {rows[name]}", flush=True)
    print_result("speculation_stalls", {"active": active, "bound_ms": bound_ms, **rows})


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("speculation", __doc__, "scripts")
    add = parser.add_argument
    add("--preset", choices=[*PRESETS, *JOBS], default="copy")
    add("--model", help="default: the preset's")
    add("--active", type=COUNT, nargs="+", default=[1, 8, 32], help="sequences side by side")
    add("--engines", nargs="+", default=["ngram"], help="beside plain")
    add("--requests", type=COUNT, help="default: three for each active one, at least 6")
    add("--draft-layers", type=COUNT, default=1, help="of the engine draft")
    add("--draft-head", help="of the engines head and both")
    add("--seed", type=int, default=0)
    add("--stall-ms", type=MILLISECONDS, help="measure stalls instead, with this bound")
    args = parser.parse_args(argv)
    machine = check_machine()
    tokenizer = None
    if args.preset in JOBS:
        if args.model is None:
            parser.error(f"--preset {args.preset} needs --model: see python -m scripts.real_model")
        model, tokenizer = load_chat_model(args.model)
        vocab = tokenizer.vocab_size
    else:
        model, vocab = load_model(args.model or PRESETS[args.preset].model)
    print(f"{args.preset}; {machine_text(machine)}")
    if args.stall_ms is not None:
        return measure_stalls(model, vocab, args.active[0], args.stall_ms)
    result: dict[str, Any] = {**vars(args), **machine, "rows": []}
    rows = [
        [
            "active",
            "engine",
            "tokens/s",
            "ratio",
            "decode",
            "steps",
            "drafts",
            "right",
            "rows/step",
            "same",
            "right by depth",
        ]
    ]
    for active in args.active:
        count = args.requests or max(6, 3 * active)
        if args.preset in JOBS:
            jobs = JOBS[args.preset](tokenizer, count)
        else:
            jobs = make_jobs(PRESETS[args.preset], vocab, args.seed, count)
        tokens = sum(sorted((len(j.prompt) + j.max_tokens for j in jobs), reverse=True)[:active])
        options = {
            "tokenizer": tokenizer,
            "max_running": active,
            "max_kv_tokens": tokens + 64 * active,
            "draft_head": args.draft_head,
        }
        contenders = [
            Contender(name, make_engine(name, model, args.draft_layers, **options))
            for name in ("plain", *args.engines)
        ]
        if args.preset == "forced-edit":
            answers = dict(tasks(tokenizer, count))
            for each in contenders:
                runner: Any = each.engine.runner
                runner.sampler = Forced(runner.sampler, answers)
        race(contenders, jobs, ignore_eos=args.preset not in JOBS)
        for each in contenders:
            row = each.row(contenders[0])
            rows.append([str(active), each.name, *map(str, row.values())])
            result["rows"].append({"active": active, "engine": each.name, **row})
            print(rows[-1], flush=True)
    print(table(rows))
    print_result("speculation", result)


if __name__ == "__main__":
    main()
