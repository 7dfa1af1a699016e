"""Decode kernels in the emulator, this package's and MLX's own: what they do, counted.

The emulator of tests/metal_emulator runs them on the same work, and every result is compared with
float64. All counts are per tile: 32 keys of one KV head, for all query heads that share it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged import _ext
from tests.metal_emulator import GpuCode, LaunchStats, Mode, gpu_code
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.paged_cases import TOLERANCE, random_case, worst_error

ROOT = Path(__file__).resolve().parents[2]
TILE = 32
"""Keys of one KV head: what counts are divided by."""
KV_HEADS = 8
"""Of the model. What one of them costs is counted."""
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Work:
    """Sequences that decode one token each, in float16; `group` query heads share a KV head."""

    head_dim: int
    group: int
    contexts: tuple[int, ...]

    @property
    def tiles(self) -> float:
        """Of one KV head, of all sequences together."""
        return sum(self.contexts) / TILE

    @property
    def live_bytes(self) -> int:
        """Of the keys and values of a tile."""
        return 2 * 2 * self.head_dim * TILE

    def __str__(self) -> str:
        longest, rest = self.contexts[0], self.contexts[1:]
        return f"{longest:,} + {len(rest)} of {rest[0]}" if rest else f"{longest:,}"


def ragged(context: int, batch: int) -> tuple[int, ...]:
    """One long context, and others of an eighth of it, but no more than 512 keys."""
    return (context, *[min(512, context // 8)] * (batch - 1))


@dataclass(frozen=True, slots=True)
class Counts:
    """What all launches of one call did for a tile.

    Bytes `asked` are what lanes ask for, repetitions included; those `moved` have each byte once a
    threadgroup; `least` once a call. `kv_` are those of keys and values alone. Instructions, the
    lines of 128 bytes that they touch and operations count once for all lanes that execute them
    together, and barriers once a threadgroup. `matrix_accesses` are loads and stores of matrices,
    here all of threadgroup memory.
    """

    kv_moved: float
    kv_least: float
    asked: float
    moved: float
    least: float
    lines: float
    accesses: float
    loads: float
    table_loads: float
    reductions: float
    shuffles: float
    matrix_products: float
    matrix_accesses: float
    exponentials: float
    multiplies_64: float
    barriers: float
    simdgroup_barriers: float


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch in the emulator.

    Attributes:
        stats: of the whole launch.
        roles: what its buffers hold: "q", "kv", "table", "partial", "out" or another word.
        weight: how many of a call's launches for one KV head it stands for.
    """

    stats: LaunchStats
    roles: dict[int, str]
    weight: float = 1.0

    def counts(self) -> dict[str, float]:
        """By the names of Counts."""
        s = self.stats
        of_kv = [i for i, role in self.roles.items() if role == "kv"]
        once = {i: s.unique_loaded_bytes[i] for i in self.roles}
        lines = [s.lines[i] for i in self.roles]
        stored = sum(s.stored_bytes[i] for i in self.roles)
        matrix_ops = s.matrix_multiplications + s.matrix_accesses
        found = {
            "kv_moved": sum(once[i].per_threadgroup for i in of_kv),
            "kv_least": sum(once[i].per_launch for i in of_kv),
            "asked": stored + sum(s.loaded_bytes[i] for i in self.roles),
            "moved": stored + sum(each.per_threadgroup for each in once.values()),
            "least": stored + sum(each.per_launch for each in once.values()),
            "lines": sum(each.loaded + each.stored for each in lines),
            "accesses": sum(each.load_instructions + each.store_instructions for each in lines),
            "loads": sum(each.load_instructions for each in lines),
            "table_loads": sum(
                s.lines[i].load_instructions for i, role in self.roles.items() if role == "table"
            ),
            "reductions": s.simd_reductions,
            "shuffles": s.simd_ops - s.simd_reductions - matrix_ops,
            "matrix_products": s.matrix_multiplications,
            "matrix_accesses": s.matrix_accesses,
            "exponentials": s.operations["exponential"].by_simdgroups,
            "multiplies_64": s.operations["multiply_64"].by_simdgroups,
            "barriers": s.barriers,
            "simdgroup_barriers": s.simdgroup_barriers,
        }
        return {name: self.weight * value for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one work. Threadgroups, threads and code are those of the launch that reads the
    keys; `sizes` are the chips that take this kernel."""

    work: Work
    kernel: str
    sizes: tuple[str, ...]
    launches: int
    threadgroups: int
    threads: int
    threadgroup_bytes: int
    code: GpuCode
    counts: Counts


def total(work: Work, launched: Iterable[Launched]) -> Counts:
    """The counts of all launches, for a tile."""
    found = [each.counts() for each in launched]
    return Counts(**{name: sum(each[name] for each in found) / work.tiles for name in found[0]})


def _plan(work: Work, kv_heads: int, spare_columns: int) -> list[dict[str, Any]]:
    """The launches that the op makes of this work."""
    batch = len(work.contexts)
    columns = -(-max(work.contexts) // BLOCK_SIZE) + spare_columns
    caches = (mx.zeros((kv_heads, 1, BLOCK_SIZE, work.head_dim), mx.float16) for _ in range(2))
    call = _ext.metal.plan_attention(
        mx.zeros((batch, kv_heads * work.group, 1, work.head_dim), mx.float16),
        *caches,
        mx.zeros((batch, columns), mx.int32),
        mx.ones((batch,), mx.int32),
        scale=1.0,
    )
    return list(call["launches"])


def _threadgroups(launch: dict[str, Any]) -> int:
    each = launch["threadgroup"] if launch["grid_in_threads"] else (1, 1, 1)
    return prod(-(-n // size) for n, size in zip(launch["grid"], each, strict=True))


def _roles(launch: dict[str, Any]) -> dict[int, str]:
    """What the launch's buffers hold, by index."""
    inputs = {0: "q", 3: "table", 4: "length"}
    names = {"pool_read": "kv", "scratch": "partial", "output": "out"}
    return {
        index: inputs.get(n, "option") if role == "input" else names[role]
        for index, role, n in launch["buffers"]
    }


@cache
def _code(
    source: str, kernel: str, threads: int, constants: tuple[tuple[int, int], ...]
) -> GpuCode:
    return gpu_code(source, kernel, threads, dict(constants))


def worst(codes: Sequence[GpuCode]) -> GpuCode:
    """Of kernels that share the work, what is worst of any."""
    return GpuCode(
        registers=max(code.registers for code in codes),
        spilled=max(code.spilled for code in codes),
        bytes_in_flight=min(code.bytes_in_flight for code in codes),
        dependent_loads=max(code.dependent_loads for code in codes),
        loop_instructions=max(code.loop_instructions for code in codes),
    )


def paged(work: Work, spare_columns: int = 0) -> Row:
    """This package's kernels on shuffled blocks of 16 tokens. Block tables have so many columns
    more than the longest context needs.

    One KV head runs alone if the plan for all of them only has as many threadgroups more; else all
    of them run.
    """
    plan, of_one = (_plan(work, heads, spare_columns) for heads in (KV_HEADS, 1))
    sizes = [[_threadgroups(launch) for launch in launches] for launches in (plan, of_one)]
    run_heads = 1 if sizes[0] == [KV_HEADS * n for n in sizes[1]] else KV_HEADS
    case = random_case(
        work.contexts,
        num_heads=run_heads * work.group,
        num_kv_heads=run_heads,
        head_dim=work.head_dim,
        dtype=mx.float16,
        block_size=BLOCK_SIZE,
        spare_columns=spare_columns,
    )
    call = _ext.metal.plan_attention(*case.arrays, scale=case.scale)
    runner = MetalRunner(Mode.RACE)
    out = runner.run(call)[0].astype(mx.float16)
    assert worst_error(out, case.expected()[0]) < TOLERANCE[mx.float16]
    launched = [
        Launched(stats, _roles(launch), 1 / run_heads)
        for launch, stats in zip(call["launches"], runner.trace.stats, strict=True)
    ]
    readers = [i for i, each in enumerate(launched) if "kv" in each.roles.values()]
    codes = [
        _code(
            plan[i]["source"],
            plan[i]["kernel"],
            prod(plan[i]["threadgroup"]),
            tuple(sorted(plan[i]["constants"].items())),
        )
        for i in readers
    ]
    return Row(
        work=work,
        kernel="paged",
        sizes=(),
        launches=len(plan),
        threadgroups=sum(sizes[0][i] for i in readers),
        threads=max(prod(plan[i]["threadgroup"]) for i in readers),
        threadgroup_bytes=max(launched[i].stats.threadgroup_bytes for i in readers),
        code=worst(codes),
        counts=total(work, launched),
    )


def decode_limits() -> dict[str, float]:
    """What 32 more keys cost the decode kernel at D 128 and groups of four, without what a call
    costs in any case: its start and its merges. With the registers of a lane, and with those that
    it needs where 12 simdgroups have to fit on a scheduler."""
    few, many = Work(128, 4, (256,)), Work(128, 4, (512,))
    # Tables of the same width, because that decides how a context is split.
    rows = (paged(few, spare_columns=256 // BLOCK_SIZE), paged(many))
    begin, end = (asdict(row.counts) for row in rows)
    more = {
        name: (end[name] * many.tiles - begin[name] * few.tiles) / (many.tiles - few.tiles)
        for name in end
    }
    launch = _plan(many, KV_HEADS, 0)[0]
    threads = prod(launch["threadgroup"])
    source, kernel, constants = (launch[name] for name in ("source", "kernel", "constants"))
    least = gpu_code(source, kernel, threads, constants, simdgroups=12)
    assert least.spilled == 0
    return {
        "table_loads": more["table_loads"],
        "simd_operations": more["reductions"] + more["shuffles"],
        "exponentials": more["exponentials"],
        "kv_bytes": more["kv_moved"] / many.live_bytes,
        "registers": rows[1].code.registers,
        "fewest_registers": least.registers,
    }
