"""Make, use and drop an engine of each kind many times, and say what the process still holds.

    python -m scripts.made_and_dropped [--model DIR] [--times 20] [--kinds plain,compiled,...]

For each kind the table has MLX's active memory, the bytes of pools that MLX does not count,
resident memory, file descriptors and threads after the first engine and after the last one; the
first two before the first engine. The exit status is 1 if resident memory grew by more than 64 MB,
active memory by more than constants that the process keeps, or anything else at all. Nothing is
random. Under mlx.launch rank 0 prints its own table, and each engine runs on all ranks.
"""

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

from mlx_paged import BatchGenerator, Engine, EngineService, demo_model_path, ops, patched_mlx_lm
from mlx_paged.cli import Parser
from mlx_paged.metrics.stats import resident_bytes
from mlx_paged.runner.ranks import joined

PROMPT = "def read_lines(path):\n    with open(path) as f:\n        return [line for line in f]\n"
ROOM: dict[str, Any] = {"max_kv_tokens": 2048}
MAY_GROW = {"resident": 64 << 20, "active": 1 << 14}  # bytes

Kinds = dict[str, Callable[[], object]]


def kinds_of(model: Any, tokenizer: Any, disk: str) -> Kinds:
    """What makes, uses and drops an engine, by the name of its kind."""

    def engine(**options: Any) -> Engine:
        made = Engine(model, tokenizer, **ROOM, **options)
        made.generate([PROMPT, PROMPT + "x"], max_tokens=8)
        return made

    def under_way() -> None:
        made = Engine(model, tokenizer, **ROOM)
        made.add_request(PROMPT, max_tokens=30)
        for _ in range(3):
            made.step()

    def service(**options: Any) -> None:
        with EngineService(Engine(model, tokenizer, prewarm=None, **ROOM, **options)) as running:
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
        "draft model": lambda: engine(draft_model=model, compile=True),
        "disk closed": lambda: engine(kv_disk=disk).close(),
        "disk dropped": lambda: engine(kv_disk=disk),
        "grammar": lambda: engine().generate([PROMPT], max_tokens=8, regex="[a-z]{5}"),
        "profile": lambda: engine(profile=True),
        "quantized": lambda: engine(kv_bits=8),
        "beams": lambda: engine().beam_search(PROMPT, 3, max_tokens=8),
        "under way": under_way,
        "service": service,
        "service compiled": lambda: service(compile=True),
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
    return [name for name in first if last[name] > first[name] + MAY_GROW.get(name, 0)]


def measure(kinds: Kinds, times: int) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """What is held after the first and after the last engine of each kind; MLX's memory and that of
    pools before the first one, because one engine of them may be held as long as no other is
    used."""
    measured = {}
    for name, use in kinds.items():
        before = held()
        use()
        first = held() | {key: before[key] for key in ("active", "pools")}
        for _ in range(times - 1):
            use()
        if grown(first, held()):
            time.sleep(1)  # threads of a dropped store end a moment later
        measured[name] = first, held()
    return measured


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="scripts.made_and_dropped", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=demo_model_path(), type=Path)
    parser.add_argument("--times", default=20, type=int)
    parser.add_argument("--kinds", help="names with commas between; default: all")
    options = parser.parse_args(arguments)
    model, tokenizer = mlx_lm.load(str(options.model))[:2]
    mx.eval(model.state)
    model = joined(model)
    with tempfile.TemporaryDirectory() as disk:
        kinds = kinds_of(model, tokenizer, disk)
        if options.kinds is not None:
            chosen = options.kinds.split(",")
            if unknown := set(chosen) - kinds.keys():
                parser.error(
                    f"--kinds has {', '.join(unknown)}: expected some of {', '.join(kinds)}"
                )
            kinds = {name: kinds[name] for name in chosen}
        measured = measure(kinds, options.times)
    print("| kind | active MB | pools MB | resident MB | descriptors | threads |")
    print("|---|---|---|---|---|---|")
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
