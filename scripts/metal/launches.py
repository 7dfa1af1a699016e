"""The decode kernels in the emulator, this package's and MLX's own: what they do, counted.

The emulator of tests/metal_emulator runs both on the same shapes, and both results are compared
with float64.
"""

import functools
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from scripts.metal.model import (
    EXPONENTIAL,
    LANES,
    REDUCTION,
    SHUFFLE,
    SIZES,
    Work,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

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

TEAMS = 2
"""Of the paged kernel's simdgroups at D up to 256: each takes a key."""
MLX_KEYS = 4
"""That MLX's first pass loads together."""

QUERIES = 0
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

    def mlx_blocks(self, size: str, context: int) -> int:
        """Threadgroups of MLX's first pass that share a KV head on a chip of this size; 0 if there
        is one pass only.

        Raises:
            ValueError: if the heads do not come in groups of four, where MLX does otherwise.
        """
        if self.heads != 4 * self.kv_heads:
            raise ValueError(f"shape is {self}: expected four query heads to a KV head")
        if context < (1024 if size in ("Max", "Ultra") else 4096):
            return 0
        return 128 if size == "Ultra" else 64


SHAPES = (Shape(32, 8, 128), Shape(8, 2, 64))


@dataclass(frozen=True, slots=True)
class Counts:
    """What all launches of one call did, over its number of output rows, H.

    Bytes `asked` are what lanes ask for, repetitions included; those `per_group` have each byte
    once a threadgroup, and those `once` once. Instructions, the lines of 128 bytes that they touch
    and simdgroup operations are counted once a simdgroup.
    """

    q_asked: float
    q_per_group: float
    q_loads: float
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
    sizes: tuple[str, ...]
    threadgroups: int
    threads: int
    threadgroup_bytes: int
    lane_bytes: int
    counts: Counts

    def work(self) -> Work:
        """What the model needs to know, of the whole call."""
        c, rows = self.counts, self.shape.heads
        extra = c.q_per_group + c.table_per_group + c.merged + c.stored
        multiplications = 3 * self.context * self.shape.head_dim / LANES
        exponentials = 2 * self.context / (TEAMS if self.kernel == "paged" else 1)
        instructions = (
            c.accesses
            + REDUCTION * c.reductions
            + SHUFFLE * c.shuffles
            + EXPONENTIAL * exponentials
            + multiplications
        )
        return Work(
            label=f"{self.context:,} | {self.kernel}",
            sizes=self.sizes,
            least_bytes=rows * (c.kv_once + extra),
            most_bytes=rows * (c.kv_per_group + extra),
            instructions=rows * instructions,
            threadgroups=self.threadgroups,
            threads=self.threads,
            threadgroup_bytes=self.threadgroup_bytes,
            lane_bytes=self.lane_bytes,
        )


def _row(
    shape: Shape,
    context: int,
    kernel: str,
    stats: list[LaunchStats],
    lane_bytes: int,
    sizes: tuple[str, ...] = SIZES,
) -> Row:
    # A paged call that is not split has nothing to merge.
    launches = list(zip(stats, ARRAYS[kernel.split(" of ")[0]], strict=False))
    first, rest = stats[0], launches[1:]
    tables = TABLES if kernel == "paged" else ()
    lines = [s.lines[i] for s, own in launches for i in own & {*s.lines}]
    totals = Counts(
        q_asked=first.loaded_bytes[QUERIES],
        q_per_group=first.unique_loaded_bytes[QUERIES].per_threadgroup,
        q_loads=first.lines[QUERIES].load_instructions,
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
    return Row(
        shape,
        context,
        kernel,
        sizes,
        first.threadgroups,
        threads,
        first.threadgroup_bytes,
        lane_bytes,
        per_row,
    )


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
    rows, vectors = shape.heads // shape.kv_heads, shape.head_dim // (LANES // TEAMS)
    floats = 2 * vectors * (rows + 1) + 2 * rows  # queries, outputs, key, value; maxima and sums
    return _row(shape, context, "paged", runner.trace.stats, 4 * floats)


@functools.cache
def _mlx_library(head_dim: int) -> Library:
    kernels = {f"sdpa_vector_{name}float16_t_{head_dim}" for name in ("", "2pass_1_", "2pass_2_")}
    return Library.from_file(mlx_kernels.SOURCE, [mlx_include_dir()], Mode.RACE, kernels)


def contiguous(shape: Shape, context: int, blocks: int, sizes: tuple[str, ...] = SIZES) -> Row:
    """MLX's kernel on contiguous keys and values, in two passes of `blocks` or, if 0, in one."""
    case = Case(FLOAT16, 1, shape.heads, shape.kv_heads, 1, context, shape.head_dim)
    problem, library = Problem(case), _mlx_library(shape.head_dim)
    elements = shape.head_dim // LANES
    if not blocks:
        out, stats = mlx_kernels.run_one_pass(problem, library)
        launches, name = [stats], "MLX, one pass"
        lane_bytes = 4 * (3 * elements + 2)  # query, key, output; maximum and sum
    else:
        out, launches = mlx_kernels.run_two_pass(problem, library, num_blocks=blocks)
        name = f"MLX, two passes of {blocks}"
        lane_bytes = 4 * (2 * elements + 2) + 2 * MLX_KEYS * 2 * elements  # keys, values as halfs
    assert relative_rms(to_float64(out, FLOAT16), problem.in_float64()) < FLOAT16.tolerance
    return _row(shape, context, name, launches, lane_bytes, sizes)


def rows(shape: Shape, context: int) -> Iterator[Row]:
    """On one shape at one context length this package's kernel, and those of MLX's that some chip
    takes."""
    yield paged(shape, context)
    chosen: dict[int, list[str]] = {}
    for size in SIZES:
        chosen.setdefault(shape.mlx_blocks(size, context), []).append(size)
    for blocks, sizes in chosen.items():
        yield contiguous(shape, context, blocks, tuple(sizes))
