"""Counts what the Metal decode kernels do, beside MLX's own: writes docs/metal-counts.md.

    python -m scripts.metal_counts [--context 512 ...]

The emulator of tests/metal_emulator runs both on the same shapes, and both results are compared
with float64. With other contexts than the document's, the text goes to stdout. The last line on
stdout is JSON.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from scripts.metal_model import LANES, Work, model_table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from metal_emulator import LaunchStats, Library, Mode, mlx_include_dir  # noqa: E402
from metal_emulator import mlx_sdpa_vector as mlx_kernels  # noqa: E402
from metal_emulator.attention_cases import (  # noqa: E402
    FLOAT16,
    Case,
    Problem,
    relative_rms,
    to_float64,
)
from metal_runner import MetalRunner  # noqa: E402
from paged_cases import TOLERANCE, random_case, worst_error  # noqa: E402

DOCUMENT = ROOT / "docs" / "metal-counts.md"
CONTEXTS = (512, 4096, 32768)
MLX_BLOCKS = 64
"""Threadgroups of MLX's first pass that share a KV head on a base chip with groups of 4 heads."""
ONE_PASS_LIMIT = 4096
"""MLX takes its two-pass kernels from here on; above, the one-pass kernel is not counted."""

KEYS_AND_VALUES = (1, 2)
TABLES = (3, 4)
ARRAYS = {
    "paged": ({0, 1, 2, 3, 4, 6, 7, 8}, {0, 1, 3}),
    "MLX, one pass": ({0, 1, 2, 3},),
    "MLX, two passes": ({0, 1, 2, 3, 4, 5}, {0, 1, 2, 3}),
}
"""Buffers of each launch that are no constants."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One sequence that decodes one token: H query heads, H_kv KV heads, dimension D, float16."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"H {self.heads}, H_kv {self.kv_heads}, D {self.head_dim}"


SHAPES = (Shape(32, 8, 128), Shape(8, 2, 64))


@dataclass(frozen=True, slots=True)
class Counts:
    """What all launches of one call did, over its number of output rows, H.

    Bytes `asked` are what lanes ask for, repetitions included; those `per_group` have each byte
    once a threadgroup, and those `once` once. Instructions, the lines of 128 bytes that they touch
    and simdgroup operations are counted once a simdgroup.
    """

    kv_asked: float
    kv_per_group: float
    kv_once: float
    kv_loads: float
    kv_lines: float
    table_asked: float
    table_per_group: float
    table_loads: float
    merged: float
    stored: float
    reductions: float
    shuffles: float
    barriers: float
    accesses: float


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one shape at one context length."""

    shape: Shape
    context: int
    kernel: str
    threadgroups: int
    threads: int
    threadgroup_bytes: int
    counts: Counts

    def work(self) -> Work:
        """What the model needs to know, of the whole call."""
        c, rows = self.counts, self.shape.heads
        extra = c.table_per_group + c.merged + c.stored
        multiply_adds = 2 * self.context * self.shape.head_dim
        instructions = c.accesses + 5 * c.reductions + c.shuffles + multiply_adds / LANES
        return Work(
            label=f"{self.context:,} | {self.kernel}",
            least_bytes=rows * (c.kv_once + extra),
            most_bytes=rows * (c.kv_per_group + extra),
            instructions=rows * instructions,
            threadgroups=self.threadgroups,
            threads=self.threads,
            threadgroup_bytes=self.threadgroup_bytes,
        )


QUANTITIES: dict[str, Callable[[Row], float]] = {
    "threadgroups": lambda row: row.threadgroups,
    "threads in each": lambda row: row.threads,
    "bytes of threadgroup memory": lambda row: row.threadgroup_bytes,
    "K/V bytes, asked for": lambda row: row.counts.kv_asked,
    "K/V bytes, once a threadgroup": lambda row: row.counts.kv_per_group,
    "K/V bytes, once": lambda row: row.counts.kv_once,
    "K/V load instructions": lambda row: row.counts.kv_loads,
    "lines that one of them touches": lambda row: row.counts.kv_lines / row.counts.kv_loads,
    "bytes of such a line that it asks for": lambda row: row.counts.kv_asked / row.counts.kv_lines,
    "table bytes, asked for": lambda row: row.counts.table_asked,
    "table bytes, once a threadgroup": lambda row: row.counts.table_per_group,
    "table load instructions": lambda row: row.counts.table_loads,
    "bytes of partial results loaded": lambda row: row.counts.merged,
    "bytes stored": lambda row: row.counts.stored,
    "`simd_sum`, `simd_max`": lambda row: row.counts.reductions,
    "other simdgroup operations": lambda row: row.counts.shuffles,
    "threadgroup barriers": lambda row: row.counts.barriers,
}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.2f}"


def _row(shape: Shape, context: int, kernel: str, stats: list[LaunchStats]) -> Row:
    # A paged call that is not split has nothing to merge.
    launches = list(zip(stats, ARRAYS[kernel], strict=False))
    first, rest = stats[0], launches[1:]
    tables = TABLES if kernel == "paged" else ()
    lines = [s.lines[i] for s, own in launches for i in own & {*s.lines}]
    totals = Counts(
        kv_asked=sum(first.loaded_bytes[i] for i in KEYS_AND_VALUES),
        kv_per_group=sum(first.unique_loaded_bytes[i].per_threadgroup for i in KEYS_AND_VALUES),
        kv_once=sum(first.unique_loaded_bytes[i].per_launch for i in KEYS_AND_VALUES),
        kv_loads=sum(first.lines[i].load_instructions for i in KEYS_AND_VALUES),
        kv_lines=sum(first.lines[i].loaded for i in KEYS_AND_VALUES),
        table_asked=sum(first.loaded_bytes[i] for i in tables),
        table_per_group=sum(first.unique_loaded_bytes[i].per_threadgroup for i in tables),
        table_loads=sum(first.lines[i].load_instructions for i in tables),
        merged=sum(s.unique_loaded_bytes[i].per_launch for s, own in rest for i in own),
        stored=sum(sum(s.stored_bytes.values()) for s in stats),
        reductions=sum(s.simd_reductions for s in stats),
        shuffles=sum(s.simd_ops - s.simd_reductions for s in stats),
        barriers=sum(s.barriers for s in stats),
        accesses=sum(each.load_instructions + each.store_instructions for each in lines),
    )
    per_row = Counts(**{name: n / shape.heads for name, n in asdict(totals).items()})
    threads = first.threads // first.threadgroups
    memory = max(s.threadgroup_bytes for s in stats)
    return Row(shape, context, kernel, first.threadgroups, threads, memory, per_row)


def paged(shape: Shape, context: int) -> Row:
    """This package's kernel on shuffled blocks of 16 tokens."""
    case = random_case(
        [context],
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=mx.float16,
        spare_columns=0,
    )
    runner = MetalRunner(Mode.RACE)
    q, k_cache, v_cache, tables, lens = case.arrays
    out = runner.paged_attention(q, [k_cache], [v_cache], tables, lens)
    assert worst_error(out, case.expected()[0]) < TOLERANCE[mx.float16]
    return _row(shape, context, "paged", runner.trace.stats)


@functools.cache
def _mlx_library(head_dim: int) -> Library:
    kernels = {f"sdpa_vector_{name}float16_t_{head_dim}" for name in ("", "2pass_1_", "2pass_2_")}
    return Library.from_file(mlx_kernels.SOURCE, [mlx_include_dir()], Mode.RACE, kernels)


def contiguous(shape: Shape, context: int, passes: int) -> Row:
    """MLX's kernel on contiguous keys and values."""
    case = Case(FLOAT16, 1, shape.heads, shape.kv_heads, 1, context, shape.head_dim)
    problem, library = Problem(case), _mlx_library(shape.head_dim)
    if passes == 1:
        out, stats = mlx_kernels.run_one_pass(problem, library)
        launches = [stats]
    else:
        out, launches = mlx_kernels.run_two_pass(problem, library, num_blocks=MLX_BLOCKS)
    assert relative_rms(to_float64(out, FLOAT16), problem.in_float64()) < FLOAT16.tolerance
    name = "MLX, one pass" if passes == 1 else "MLX, two passes"
    return _row(shape, context, name, launches)


def rows(shape: Shape, context: int) -> Iterator[Row]:
    """All kernels on one shape at one context length."""
    yield paged(shape, context)
    if context <= ONE_PASS_LIMIT:
        yield contiguous(shape, context, passes=1)
    if context >= ONE_PASS_LIMIT:
        yield contiguous(shape, context, passes=2)


HEADER = """# What the Metal decode kernels do

Generated by `python -m scripts.metal_counts`; do not edit. `tests/test_metal_counts.py` compares
the counts at a context of 512 with fresh ones.

One sequence decodes one token, float16, blocks of 16 tokens in shuffled order. The emulator of
`tests/metal_emulator` runs this package's kernel, and MLX's own `sdpa_vector` from the wheel's
headers on contiguous keys and values; both results agree with float64. Nothing here was measured
on a GPU. MLX's host code takes the one-pass kernel below 4,096 keys (on the largest chips below
1,024) and the two-pass kernels, here with 64 threadgroups a KV head, from there on.

Threadgroups, their threads and their memory are those of the kernel that reads the keys. All other
counts are of the whole call, the merge of partial results included, over the number of output
rows, H. A line has 128 bytes. Instructions, simdgroup operations and barriers are counted once for
all lanes that execute them together.

The load instructions are those of the code that clang makes for x86-64. It loads the two or four
neighbouring halfs that a lane of MLX's kernels wants one by one; Apple's compiler may make one load
of them. The paged kernel asks for vectors of four itself.
"""

FINDINGS = """
## What paging adds

- Keys and values: nothing. Each byte comes once from memory as in MLX's kernels, and once for all
  four heads of a group where each head of MLX's asks again. Every line that a load touches is used
  whole: a row of a head has 128 bytes at D 64 and 256 at D 128, and so begins with a line.
- Tables: 4 bytes a block and 4 a threadgroup. Every simdgroup loads the entry of its next two keys
  anew, all lanes the same word, so that the eight of a threadgroup load an entry of 16 keys eight
  times, seven of them from a cache. Keys that a simdgroup takes block by block would need one load
  a block instead, but leave simdgroups without work in contexts below 128 keys.
- Barriers: one a threadgroup at D 64 and three at D 128, where it merges its rows in two parts; the
  more splits, the more a row. MLX's kernels take two for each element that a lane holds.
- Partial results: float32 where MLX rounds to float16, of fewer splits at short contexts.
- Two keys share a simdgroup, and four shuffles add up the scores of a row for both. MLX calls
  `simd_sum` for each key, which is five such steps unless the hardware knows better.
- Threadgroup memory: 8,448 bytes, which leaves room for three of the four threadgroups that would
  make 1,024 threads.
"""


def section(shape: Shape, context: int, found: Sequence[Row]) -> str:
    """The table of one shape and context."""
    found = [row for row in found if (row.shape, row.context) == (shape, context)]
    lines = [f"| {shape}, context {context:,} | {' | '.join(row.kernel for row in found)} |"]
    lines.append("|---|" + "--:|" * len(found))
    for name, quantity in QUANTITIES.items():
        lines.append(f"| {name} | {' | '.join(_number(quantity(row)) for row in found)} |")
    return "\n".join(["", *lines, ""])


def document(found: Sequence[Row]) -> str:
    """The whole file."""
    cases = dict.fromkeys((row.shape, row.context) for row in found)
    works = [(str(row.shape), row.work()) for row in found]
    sections = (section(shape, context, found) for shape, context in cases)
    return "".join([HEADER, *sections, FINDINGS, model_table(works)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts.metal_counts", description=__doc__)
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS, metavar="KEYS")
    args = parser.parse_args()
    mx.set_default_device(mx.Device(mx.cpu))
    cases = [(shape, context) for shape in SHAPES for context in args.context]
    found = [row for case in tqdm(cases, disable=None) for row in rows(*case)]
    if tuple(args.context) == CONTEXTS:
        DOCUMENT.write_text(document(found))
    else:
        print(document(found))
    print(json.dumps([asdict(row) for row in found]))


if __name__ == "__main__":
    main()
