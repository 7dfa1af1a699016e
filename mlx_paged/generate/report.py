"""Prints the texts and the statistics, and writes the results."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged.cli import GB
from mlx_paged.engine.engine import Engine
from mlx_paged.generate.jobs import Job
from mlx_paged.metrics.tick_log import PHASES
from mlx_paged.outputs import Beam, Completion

RULE = "=" * 10
MB = 10**6


@dataclass(frozen=True, slots=True)
class Result:
    """A finished prompt; `number` is its place in the input, from 1."""

    number: int
    job: Job
    completions: list[Completion]

    @property
    def answers(self) -> Sequence[Completion | Beam]:
        """The beams of a beam search, else the completions."""
        return self.completions[0].beams or self.completions


def print_results(results: Sequence[Result], total: int) -> None:
    """Print every text under a heading with the number of its prompt."""
    for result in results:
        count = len(result.answers)
        for index, answer in enumerate(result.answers, start=1):
            which = f" ({index}/{count})" if count > 1 else ""
            print(f"{RULE} {result.number}/{total}{which}: {result.job.spec.title[:70]}")
            print(answer.text)
    sys.stdout.flush()  # stdout and stderr may be one file: the statistics must come last


def print_stats(engine: Engine) -> None:
    print(RULE, *_stats(engine), sep="\n", file=sys.stderr)


def _stats(engine: Engine) -> Iterator[str]:
    stats, ticks = engine.stats.as_dict(), engine.ticks.summary()
    for name in ("prompt", "generation"):
        rate = stats[f"{name}_tokens_per_sec"]
        yield f"{name.capitalize()}: {stats[f'{name}_tokens']} tokens, {rate:.3f} tokens-per-sec"
    if (ttft := stats["ttft_median_s"]) is not None:
        yield f"First token: after {ttft:.3f} s (median), {stats['ttft_max_s']:.3f} s at most"
    yield (
        f"K/V: {stats['peak_kv_bytes'] / MB:.3f} MB at most;"
        f" one cache for each sequence: {stats['contiguous_kv_bytes'] / MB:.3f} MB"
    )
    if drafts := stats["drafts"]:
        yield f"Drafts: {stats['accepted_drafts']} of {drafts} guessed tokens were right"
    if count := stats["preemptions"]:
        yield f"The K/V pool was full: requests lost their K/V {count} times (see --kv-memory)"
    if causes := ", ".join(f"{n} {cause}" for cause, n in ticks["spike_causes"].items()):
        yield f"Slow steps by cause: {causes} (--metrics-jsonl FILE has each step)"
    if ticks["profile"]:
        phases = (f"{name.removesuffix('_ms')} {ticks[name]['p50']:.3f}" for name in PHASES)
        yield f"Profile: median ms of {', '.join(phases)}; synchronised, slower than a normal run"
    yield f"Peak memory: {mx.get_peak_memory() / GB:.3f} GB"


def write_results(results: Sequence[Result], path: str) -> None:
    """Write one JSON object per line and completion, in input order."""
    with Path(path).open("w", encoding="utf-8") as file:
        for result in results:
            for record in _records(result):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _records(result: Result) -> Iterator[dict[str, Any]]:
    spec, first = result.job.spec, result.completions[0]
    for index, answer in enumerate(result.answers):
        completion = answer if isinstance(answer, Completion) else first
        record: dict[str, Any] = {} if spec.id is None else {"id": spec.id}
        if spec.messages is None:
            record["prompt"] = spec.prompt
        else:
            record["messages"] = spec.messages
        record |= {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "generation_tokens": len(answer.tokens),
            "tokens": answer.tokens,
            "logprobs": answer.logprobs,
        }
        if isinstance(answer, Beam):
            record["score"] = answer.score
        names = "prompt_tokens", "cached_prompt_tokens", "prefix_miss", "ttft_s", "seconds"
        record |= {name: getattr(completion, name) for name in names}
        if completion.top_logprobs:
            record["top_logprobs"] = completion.top_logprobs
        if completion.error is not None:
            record["error"] = completion.error
        if len(result.answers) > 1:
            record["index"] = index
        yield record
