"""Shows the progress, prints the texts and the statistics."""

import json
import sys
import time
from collections.abc import Iterator, Sequence

import mlx.core as mx
from tqdm import tqdm

from mlx_paged.arguments import GB
from mlx_paged.engine.engine import Engine
from mlx_paged.generate.batch_job import BatchJob
from mlx_paged.generate.results_file import Result
from mlx_paged.metrics.tick import PHASES

RULE = "=" * 10
MB = 10**6
LINE_SECONDS = 60.0  # between lines of progress where there is no terminal
BRIEF_DELAY = 0.5  # seconds until the bar of a single prompt comes


class Progress:
    """Shows on stderr how many of `total` texts are finished: in a bar if stderr is a terminal,
    else in a line after each `LINE_SECONDS`. The bar of a single prompt comes only if the work
    takes long, and goes at its end."""

    def __init__(self, total: int, *, is_shown: bool, is_brief: bool) -> None:
        self._total = total
        self._has_lines = is_shown and not sys.stderr.isatty()
        self._started = self._next_line = time.monotonic()
        self._next_line += LINE_SECONDS
        self._bar = tqdm(
            total=total,
            file=sys.stderr,
            disable=None if is_shown else True,
            miniters=0,  # a step that ends no text is progress, too
            delay=BRIEF_DELAY if is_brief else 0,
            leave=not is_brief,
            bar_format="{n}/{total} texts |{bar}| {elapsed}<{remaining}{postfix}",
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._bar.close()

    def show(self, done: int, details: str) -> None:
        """Show that `done` texts are finished, and what the steps have computed."""
        self._bar.set_postfix_str(details, refresh=False)
        self._bar.update(done - self._bar.n)
        now = time.monotonic()
        if self._has_lines and now >= self._next_line:
            self._next_line = now + LINE_SECONDS
            elapsed = tqdm.format_interval(now - self._started)
            line = f"{elapsed} {done}/{self._total} texts, {details}"
            print(line, file=sys.stderr, flush=True)


def progress_of(engine: Engine, prompt_tokens: int) -> str:
    """What the steps so far have done, for the bar; `prompt_tokens` are those of all prompts."""
    stats = engine.stats
    known = min(prompt_tokens, stats.prompt_tokens + stats.prefix_hit_tokens)
    return (
        f"{known}/{prompt_tokens} prompt tokens, {stats.generation_tokens} generated,"
        f" {engine.levels().running} running"
    )


def print_results(results: Sequence[Result], total: int) -> None:
    """Print every text under a heading with the number of its prompt; of a batch line, its answer
    as JSON."""
    for result in results:
        if isinstance(result.job, BatchJob):
            print(json.dumps(result.job.record, ensure_ascii=False))
            continue
        count = len(result.answers)
        for index, answer in enumerate(result.answers, start=1):
            which = f" ({index}/{count})" if count > 1 else ""
            print(f"{RULE} {result.job.number}/{total}{which}: {result.job.spec.title[:70]}")
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
        queued = f"{ttft:.3f} s (median), {stats['ttft_max_s']:.3f} s at most"
        yield f"First token: {queued} after the prompt was queued"
    yield (
        f"K/V: peak {stats['peak_kv_bytes'] / MB:.3f} MB"
        f" ({stats['peak_live_kv_bytes'] / MB:.3f} MB filled);"
        f" mlx-lm's caches: {stats['contiguous_kv_bytes'] / MB:.3f} MB"
    )
    if drafts := stats["drafts"]:
        yield f"Drafts: {stats['accepted_drafts']} of {drafts} were accepted"
    if count := stats["preemptions"]:
        yield f"The K/V pool was full: requests lost their K/V {count} times (see --kv-memory)"
    if causes := ", ".join(f"{n} {cause}" for cause, n in ticks["spike_causes"].items()):
        yield f"Slow steps by cause: {causes} (--metrics-jsonl FILE has each step)"
    if ticks["profile"]:
        phases = (f"{name.removesuffix('_ms')} {ticks[name]['p50']:.3f}" for name in PHASES)
        yield f"Profile: median ms of {', '.join(phases)}; synchronised, slower than a normal run"
    yield f"Peak memory: {mx.get_peak_memory() / GB:.3f} GB"
