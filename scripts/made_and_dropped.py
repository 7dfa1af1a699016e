"""Make, use and drop an engine of each kind many times, and say what the process still holds.

    python -m scripts.made_and_dropped [--model DIR] [--times 20] [--kinds plain,compiled,...]

For each kind the table has MLX's active memory, the bytes of pools that MLX does not count, resident
memory, file descriptors and threads after the first engine and after the last one. The exit status
is 1 if anything but resident memory grew, or resident memory by more than 64 MB.
"""

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

from mlx_paged import BatchGenerator, Engine, EngineService, ops, patched_mlx_lm
from mlx_paged.cli import DEMO_MODEL
from mlx_paged.metrics.stats import resident_bytes

PROMPT = "def read_lines(path):\n    with open(path) as f:\n        return [line for line in f]\n"
ROOM = {"max_kv_tokens": 2048}
RESIDENT_LIMIT = 64 << 20  # bytes by which resident memory may vary

Kinds = dict[str, Callable[[], object]]


def kinds_of(model: Any, tokenizer: Any, disk: str) -> Kinds:
    """What makes, uses and drops an engine, by the name of its kind."""

    def engine(**options: Any) -> Engine:
        made = Engine(model, tokenizer, **ROOM, **options)
        made.generate([PROMPT, PROMPT + "x"], max_tokens=8)
        return made

    def service() -> None:
        with EngineService(Engine(model, tokenizer, prewarm=None, **ROOM)) as running:
            running.submit(PROMPT, max_tokens=8).result()

    def batch_generator() -> None:
        generator = BatchGenerator(model, max_tokens=8)
        generator.insert([tokenizer.encode(PROMPT)] * 2)
        for _ in range(8):
            generator.next()
        generator.close()

    def drop_in() -> None:
        with patched_mlx_lm():
            mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=8)

    return {
        "plain": engine,
        "compiled": lambda: engine(compile=True),
        "n-gram drafts": lambda: engine(speculate="ngram"),
        "draft model": lambda: engine(draft_model=model),
        "disk, closed": lambda: engine(kv_disk=disk).close(),
        "disk, dropped": lambda: engine(kv_disk=disk),
        "grammar": lambda: engine().generate([PROMPT], max_tokens=8, regex="[a-z]{5}"),
        "profile": lambda: engine(profile=True),
        "quantized": lambda: engine(kv_bits=8),
        "beams": lambda: engine().beam_search(PROMPT, 3, max_tokens=8),
        "service": service,
        "BatchGenerator": batch_generator,
        "drop-in": drop_in,
    }


def held() -> dict[str, int]:
    """What the process holds once everything that nobody refers to is collected."""
    gc.collect()
    mx.clear_cache()
    return {
        "active": mx.get_active_memory(),
        "pools": ops.reserved_bytes(),
        "resident": resident_bytes(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def grown(first: dict[str, int], last: dict[str, int]) -> list[str]:
    """The names of what grew."""
    limits = {"resident": RESIDENT_LIMIT}
    return [name for name in first if last[name] > first[name] + limits.get(name, 0)]


def measure(kinds: Kinds, times: int) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """What is held after the first and after the last engine of each kind."""
    measured = {}
    for name, use in kinds.items():
        use()
        first = held()
        for _ in range(times - 1):
            use()
        measured[name] = first, held()
    return measured


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEMO_MODEL, type=Path)
    parser.add_argument("--times", default=20, type=int)
    parser.add_argument("--kinds", help="names with commas between; default: all")
    options = parser.parse_args(arguments)
    model, tokenizer = mlx_lm.load(str(options.model))[:2]
    with tempfile.TemporaryDirectory() as disk:
        kinds = kinds_of(model, tokenizer, disk)
        if options.kinds is not None:
            kinds = {name: kinds[name] for name in options.kinds.split(",")}
        measured = measure(kinds, options.times)
    print("| kind | active MB | pools MB | resident MB | descriptors | threads |\n|---|---|---|---|---|---|")
    for name, (first, last) in measured.items():
        cells = [
            f"{first[key] / unit:.0f} to {last[key] / unit:.0f}"
            for key, unit in zip(first, (1e6, 1e6, 1e6, 1, 1), strict=True)
        ]
        print("|", " | ".join([name, *cells]), "|")
    growing = {name: found for name, pair in measured.items() if (found := grown(*pair))}
    print(json.dumps({"times": options.times, "grown": growing}))
    return 1 if growing else 0


if __name__ == "__main__":
    raise SystemExit(main())
