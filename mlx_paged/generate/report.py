"""Shows the progress, prints the texts and the statistics."""

import sys
from collections.abc import Iterator, Sequence

import mlx.core as mx
from tqdm import tqdm

from mlx_paged.cli import GB
from mlx_paged.engine.engine import Engine
from mlx_paged.generate.results_file import Result
from mlx_paged.metrics.tick_log import PHASES

RULE = "=" * 10
MB = 10**6
BRIEF_DELAY = 0.5  # seconds until the bar of a single prompt comes


def progress_bar(total: int, *, is_shown: bool, is_brief: bool) -> tqdm:
    """A bar of `total` texts on stderr, if that is a terminal. A brief one comes only if the work
    takes long, and goes at its end."""
    return tqdm(
        total=total,
        file=sys.stderr,
        disable=None if is_shown else True,
        miniters=0,  # a step that ends no text is progress, too
        delay=BRIEF_DELAY if is_brief else 0,
        leave=not is_brief,
        bar_format="{n}/{total} texts |{bar}| {elapsed}<{remaining}{postfix}",
    )


def progress_of(engine: Engine, prompt_tokens: int) -> str:
    """What the steps so far have done, for the bar; `prompt_tokens` are those of all prompts."""
    stats = engine.stats
    known = min(prompt_tokens, stats.prompt_tokens + stats.prefix_hit_tokens)
    return (
        f"{known}/{prompt_tokens} prompt tokens, {stats.generation_tokens} generated,"
        f" {len(engine.scheduler.running)} running"
    )


def print_results(results: Sequence[Result], total: int) -> None:
    """Print every text under a heading with the number of its prompt."""
    for result in results:
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
        yield f"First token: after {ttft:.3f} s (median), {stats['ttft_max_s']:.3f} s at most"
    yield (
        f"K/V: {stats['peak_kv_bytes'] / MB:.3f} MB of blocks at most, with room for whole prompts;"
        f" {stats['peak_live_kv_bytes'] / MB:.3f} MB of computed tokens, for which"
        f" one cache for each sequence has {stats['contiguous_kv_bytes'] / MB:.3f} MB"
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
