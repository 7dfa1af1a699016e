"""Threadgroups and modelled times of decodes of few rows: writes docs/metal-few-rows.md.

    python -m scripts.metal.few [--before FILE]
    python -m scripts.metal.few --plans > FILE

`--plans` prints the launches as JSON. Those of an older commit are what `--before` compares with;
without it the document's own older launches stay.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged import _ext
from scripts.metal.anchors import mlx_choice
from scripts.metal.launches import BLOCK_SIZE, ROOT, Work
from scripts.metal.model import CHIPS, Chip

DOCUMENT = ROOT / "docs" / "metal-few-rows.md"
LATENCY = 0.4
"""Microseconds of a load that waits for memory: source 15 of docs/metal-counts.md."""

LAUNCH = 2.4
"""Microseconds from one launch to the next that waits for it, the first load included."""

IN_FLIGHT = 2048
"""Bytes that a simdgroup of this package's kernels asks for at once, at most."""

CONTEXTS = (128, 512, 1024, 4096, 8192, 131072)
SHORT = (64, 128, 256, 512, 1024)
BATCHES = (1, 2, 4)
NAMES = ("M1", "M4", "M4 Pro", "M4 Max", "M3 Ultra")
SHOWN = [chip for name in NAMES for chip in CHIPS if chip.name == name]


@dataclass(frozen=True, slots=True)
class Model:
    """The attention of a model's layers; `window` is that of most of them."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


MODELS = (
    Model("Llama 3.2 1B", 32, 8, 64),
    Model("Llama 3.1 8B", 32, 8, 128),
    Model("Qwen3 0.6B", 16, 8, 128),
    Model("Qwen2.5 0.5B", 14, 2, 64),
    Model("Qwen3 30B-A3B", 32, 4, 128),
    Model("Qwen2.5 7B", 28, 4, 128),
    Model("gpt-oss 20B, window 128", 64, 8, 64, 128),
    Model("Gemma 3 4B, window 1,024", 8, 4, 256, 1024),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The launch that reads the keys: threadgroups, simdgroups of one, splits of a context."""

    kernel: str
    threadgroups: int
    simdgroups: int
    splits: int

    def __str__(self) -> str:
        merge = f" / {self.splits}" if self.splits > 1 else ""
        return f"{self.threadgroups} x {self.simdgroups}{merge}"


def plan_of(model: Model, batch: int, context: int) -> Plan:
    caches = (mx.zeros((model.kv_heads, 1, BLOCK_SIZE, model.dim), mx.float16) for _ in range(2))
    call = _ext.metal.plan_attention(
        mx.zeros((batch, model.heads, 1, model.dim), mx.float16),
        *caches,
        mx.zeros((batch, context // BLOCK_SIZE), mx.int32),
        mx.ones((batch,), mx.int32),
        scale=1.0,
        window=model.window,
    )
    launch = call["launches"][0]
    x, y, z = launch["grid"]
    return Plan(launch["kernel"], x * y * z, launch["threadgroup"][0] // 32, z)


def rounds(model: Model, plan: Plan, keys: int) -> int:
    """How often the busiest simdgroup waits for keys or values, one after the other."""
    of_split = -(-keys // plan.splits)
    if plan.kernel.startswith("matrix"):
        step = 32 if model.dim <= 128 else 16
        return 2 * -(-of_split // step)
    tile = max(8, min(32, IN_FLIGHT // (2 * model.dim)))
    while tile < 32 and tile * plan.simdgroups < of_split:
        tile *= 2
    tiles = -(-of_split // (tile * plan.simdgroups))
    return tiles * 2 * -(-tile * 2 * model.dim // IN_FLIGHT)


Parts = dict[str, float]
"""Microseconds: of the keys and values, of the loads before them, and of the merge."""


def paged_time(model: Model, batch: int, context: int, chip: Chip) -> Parts:
    """A call by this package's kernels. Two loads come before the keys: the context's length and
    the entry of the table. The merge waits for three."""
    keys = min(context, model.window or context)
    plan = plan_of(model, batch, context)
    merge = LAUNCH + 2 * LATENCY if plan.splits > 1 else 0.0
    waits = LATENCY * rounds(model, plan, keys)
    return _parts(_memory(model, batch, keys, chip), waits, 2 * LATENCY, merge)


def mlx_time(model: Model, batch: int, context: int, chip: Chip) -> Parts:
    """The same of MLX's kernel. One pass has 32 simdgroups for each query head, which ask for a key
    and a value of theirs at once. The first of two passes has a simdgroup for each query head and
    part of the keys, which asks for four of each."""
    keys = min(context, model.window or context)
    group = 8 if model.group == 7 else model.group  # MLX has no rule of its own for seven
    choice = mlx_choice(Work(model.dim, group, (keys,) * batch), chip.size)
    memory = _memory(model, batch, keys, chip)
    if not choice.blocks:
        return _parts(memory, LATENCY * -(-keys // 32), 0.0, 0.0)
    waits = -(-keys // choice.blocks // 4)
    return _parts(memory, LATENCY * max(1, waits), 0.0, LAUNCH + LATENCY)


def _memory(model: Model, batch: int, keys: int, chip: Chip) -> float:
    return batch * keys * model.kv_heads * model.dim * 4 / (chip.bandwidth * 1e3)


def _parts(memory: float, waits: float, chain: float, merge: float) -> Parts:
    return {"keys": max(memory, waits), "chain": chain, "merge": merge}


def bound(own: Parts, theirs: Parts) -> str:
    """The part that is longest beside MLX's; "" if the sum of all is at most MLX's."""
    if sum(own.values()) <= 1.005 * sum(theirs.values()):
        return ""
    return max(own, key=lambda part: own[part] - theirs[part])


def plans() -> dict[str, str]:
    """Of every model, batch and context, as the document shows them."""
    cases = product(MODELS, BATCHES, CONTEXTS)
    return {f"{m.name}, {batch}, {keys}": str(plan_of(m, batch, keys)) for m, batch, keys in cases}


def threadgroup_lines(before: dict[str, str]) -> Iterator[str]:
    yield f"| model | batch | {' | '.join(f'{keys:,}' for keys in CONTEXTS)} |"
    yield f"|---|--:|{'---|' * len(CONTEXTS)}"
    after = plans()
    for model, batch in product(MODELS, BATCHES):
        cells = []
        for keys in CONTEXTS:
            name = f"{model.name}, {batch}, {keys}"
            old = before.get(name, "?")
            cells.append(after[name] if old == after[name] else f"{old} → {after[name]}")
        yield f"| {model.name} | {batch} | {' | '.join(cells)} |"


def time_lines() -> Iterator[str]:
    yield f"| model | batch | keys | {' | '.join(chip.name for chip in SHOWN)} |"
    yield f"|---|--:|--:|{'---|' * len(SHOWN)}"
    for model, batch, keys in product(MODELS, BATCHES, SHORT):
        cells = []
        for chip in SHOWN:
            both = [time(model, batch, keys, chip) for time in (paged_time, mlx_time)]
            own, theirs = (sum(parts.values()) for parts in both)
            cells.append(f"{own:.1f}, {theirs:.1f} {bound(*both)}".strip())
        yield f"| {model.name} | {batch} | {keys:,} | {' | '.join(cells)} |"


def num_above() -> tuple[int, int]:
    """In how many cells of the table this package's time is above MLX's, and how many there are."""
    cases = [*product(MODELS, BATCHES, SHORT, SHOWN)]
    return sum(bool(bound(paged_time(*case), mlx_time(*case))) for case in cases), len(cases)


def most_above() -> tuple[float, float]:
    """Microseconds that this package's kernels take more than MLX's, at most: up to 512 keys, and
    beyond."""

    def distance(*case: Any) -> float:
        return sum(paged_time(*case).values()) - sum(mlx_time(*case).values())

    few = product(MODELS, BATCHES, SHORT[:-1], SHOWN)
    many = product(MODELS, BATCHES, SHORT[-1:], SHOWN)
    return max(distance(*case) for case in few), max(distance(*case) for case in many)


def document(before: dict[str, str]) -> str:
    (above, cells), (few, many), chain = num_above(), most_above(), 2 * LATENCY
    return f"""# Decodes of few rows

`python -m scripts.metal.few --before FILE` writes this page. Do not edit it. **Nothing here was
measured on a GPU.** [What the Metal decode kernels do](metal-counts.md) has the counts that the
model is made of.

## Threadgroups

The launch that reads the keys, one new token of each sequence, float16, block tables as wide as the
context: threadgroups x simdgroups of one, and after a slash the splits of a context, whose results
a second launch merges. An arrow goes from the plan before this page was written first to the plan
now. A call of fewer than 64 threadgroups has eight simdgroups in each. Windows have splits for the
keys that they leave, so a window's plan does not grow with the context.

{chr(10).join(threadgroup_lines(before))}

## Time, with latency

    time   = max(bytes / bandwidth, rounds * latency) + dependent loads * latency + merge
    rounds = bytes of the busiest simdgroup / bytes that it has in flight
    merge  = {LAUNCH} us + dependent loads * latency, if the keys are split

- `bytes` are those of the keys and values, once. `latency` is {LATENCY * 1000:.0f} ns: source 15 of
  the counts saw "beyond 400" on an M2 Pro. {LAUNCH} us is a launch that waits for the one before:
  [mlx #4521](https://github.com/ml-explore/mlx/issues/4521) has 3,200 of them in 7.7 ms.
- A simdgroup of this package's kernels has up to {IN_FLIGHT:,} bytes in flight, one of MLX's in one
  pass a key and a value, in the first of two passes four of each. MLX's many simdgroups request
  the same bytes again: their number is not a measure.
- Dependent loads: the context's length and the entry of the block table come before the keys. MLX
  has neither. The merge waits for the length, the sums and the outputs of the splits; MLX's second
  pass for the sums and the outputs.
- The model ignores cycles: see the other model in the counts. It also ignores caches and other
  launches that run at the same time.

Microseconds of one layer's call, this package's and MLX's for the same keys without padding. Where
this package's are more, the term is named that is longest beside MLX's: `chain` are the dependent
loads, `keys` the rounds. This is so in {above} of {cells} cells. In most it is {chain:.1f} us: the
length of the context and the entry of the table come before the keys. At most it is {few:.1f} us
up to 512 keys, where heads have 256 dimensions and a simdgroup asks for four keys at once, and
{many:.1f} us at 1,024, where keys are split and MLX takes one pass on a base chip or a Pro.

{chr(10).join(time_lines())}
"""


def known_before() -> dict[str, str]:
    """The plans before, as the document has them."""
    found = {}
    for line in DOCUMENT.read_text().splitlines() if DOCUMENT.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 + len(CONTEXTS) and cells[1].isdecimal():
            for keys, cell in zip(CONTEXTS, cells[2:], strict=True):
                found[f"{cells[0]}, {cells[1]}, {keys}"] = cell.split(" → ")[0]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts.metal.few", description=__doc__)
    parser.add_argument("--plans", action="store_true", help="print the launches as JSON")
    parser.add_argument("--before", type=Path, metavar="FILE", help="launches of an older commit")
    args = parser.parse_args(argv)
    mx.set_default_device(mx.Device(mx.cpu))
    if args.plans:
        print(json.dumps(plans()))
        return
    before = json.loads(args.before.read_text()) if args.before else known_before()
    DOCUMENT.write_text(document(before))
    above, cells = num_above()
    print(json.dumps({"above": above, "cells": cells}))


if __name__ == "__main__":
    main()
