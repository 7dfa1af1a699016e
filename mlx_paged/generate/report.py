"""What the command prints and writes when its prompts are done."""

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
from mlx_paged.metrics.tick import PHASES
from mlx_paged.outputs import Completion

RULE = "=" * 10
MB = 10**6


@dataclass(frozen=True, slots=True)
class Result:
    """A finished prompt and its place in the input."""

    number: int
    job: Job
    completions: list[Completion]


def print_results(results: Sequence[Result], total: int) -> None:
    """Every text under a heading that numbers the prompt and, of several, the text."""
    for result in results:
        texts = _texts(result)
        for index, text in enumerate(texts, start=1):
            which = f" ({index}/{len(texts)})" if len(texts) > 1 else ""
            print(f"{RULE} {result.number}/{total}{which}: {result.job.spec.title[:70]}")
            print(text)
    sys.stdout.flush()  # before the statistics, where both streams go to the same place


def _texts(result: Result) -> list[str]:
    beams = result.completions[0].beams
    return [answer.text for answer in beams or result.completions]


def print_stats(engine: Engine, prewarm: bool) -> None:
    """Speeds, latencies, memory, on stderr."""
    print(RULE, *_stats(engine, prewarm), sep="\n", file=sys.stderr)


def _stats(engine: Engine, prewarm: bool) -> Iterator[str]:
    stats = engine.stats.as_dict()
    yield (
        f"Prompt: {stats['prompt_tokens']} tokens, "
        f"{stats['prompt_tokens_per_sec']:.3f} tokens-per-sec"
    )
    yield (
        f"Generation: {stats['generation_tokens']} tokens, "
        f"{stats['generation_tokens_per_sec']:.3f} tokens-per-sec"
    )
    if stats["ttft_median_s"] is not None:
        yield f"TTFT: median {stats['ttft_median_s']:.3f} s, max {stats['ttft_max_s']:.3f} s"
    yield from _ticks(engine.ticks.summary())
    yield f"Pre-warm: {_prewarm(stats['prewarm_seconds'], prewarm)}"
    yield (
        f"KV: peak {stats['peak_blocks_in_use']} of {stats['num_blocks']} blocks "
        f"({stats['peak_kv_bytes'] / MB:.3f} MB; "
        f"live tokens {stats['peak_live_kv_bytes'] / MB:.3f}, "
        f"one cache a sequence {stats['contiguous_kv_bytes'] / MB:.3f}, "
        f"padded batch {stats['padded_kv_bytes'] / MB:.3f}), {stats['blocks_in_use']} in use now"
    )
    yield f"Peak memory: {mx.get_peak_memory() / GB:.3f} GB"


def _ticks(ticks: dict[str, Any]) -> Iterator[str]:
    """How long steps took, why some of them took far too long, and the phases if profiled."""
    decode, prefill = ticks["decode_tick_ms"], ticks["prefill_chunk_ms"]
    causes = ", ".join(f"{count} {cause}" for cause, count in ticks["spike_causes"].items())
    yield (
        f"Ticks: decode p50 {decode['p50']:.3f}, p95 {decode['p95']:.3f}, p99 {decode['p99']:.3f}"
        f" ms; prefill chunk p50 {prefill['p50']:.3f} ms; spikes: {causes or 'none'}"
    )
    if ticks["profile"]:
        phases = ", ".join(
            f"{name.removesuffix('_ms')} {ticks[name]['p50']:.3f}" for name in PHASES
        )
        yield f"Profile: median ms of {phases}; synchronised, slower than a normal run"


def _prewarm(seconds: float | None, wanted: bool) -> str:
    if seconds is not None:
        return f"GPU pipelines compiled in {seconds:.3f} s"
    return "nothing to compile on a CPU" if wanted else "skipped"


def write_results(results: Sequence[Result], path: str) -> None:
    """One JSON object a line for every completion, in the order of the input."""
    with Path(path).open("w", encoding="utf-8") as file:
        for result in results:
            for record in _records(result):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _records(result: Result) -> list[dict[str, Any]]:
    spec = result.job.spec
    asked = {"prompt": spec.prompt} if spec.messages is None else {"messages": spec.messages}
    if spec.id is not None:
        asked = {"id": spec.id} | asked
    first = result.completions[0]
    if first.beams:
        answers = [_answer(beam) | {"score": beam.score} for beam in first.beams]
    else:
        answers = [_answer(completion) for completion in result.completions]
    owners = [first] * len(answers) if first.beams else result.completions
    records = [
        asked | answer | _costs(owner) for answer, owner in zip(answers, owners, strict=True)
    ]
    if len(records) > 1:
        for index, record in enumerate(records):
            record["index"] = index
    return records


def _answer(answer: Any) -> dict[str, Any]:
    """What completions and beams have in common."""
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "generation_tokens": len(answer.tokens),
        "tokens": answer.tokens,
        "logprobs": answer.logprobs,
    }


def _costs(completion: Completion) -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt_tokens": completion.prompt_tokens,
        "cached_prompt_tokens": completion.cached_prompt_tokens,
        "prefix_miss": completion.prefix_miss,
        "ttft_s": completion.ttft_s,
        "seconds": completion.seconds,
    }
    if completion.top_logprobs:
        record["top_logprobs"] = completion.top_logprobs
    if completion.error is not None:
        record["error"] = completion.error
    return record
