"""MLX's tiled attention (simdgroup_matrix) gives MLX's numbers, without a finding."""

import functools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .attention_cases import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Case,
    Problem,
    nan_filled,
    raw,
    relative_rms,
    to_float64,
)
from .launch import Buffer, LaunchStats
from .library import Library
from .mlx_headers import mlx_include_dir
from .modes import Mode

SOURCE = Path(__file__).with_name("mlx_steel_attention.metal")
TILE_ROWS = 32  # queries per threadgroup


@dataclass(frozen=True)
class Tiling:
    """Keys per step, and how many simdgroups share the rows of a tile."""

    keys: int
    simdgroups_per_row: int


NARROW = Tiling(16, 1)
WIDE = Tiling(32, 1)
SPLIT = Tiling(32, 2)

CASES = {
    Case(FLOAT32, 1, 4, 2, 100, 100): NARROW,
    Case(FLOAT32, 1, 4, 2, 40, 77, causal=True): NARROW,
    Case(FLOAT32, 1, 2, 2, 64, 64, mask="bool"): NARROW,
    Case(FLOAT32, 1, 2, 2, 70, 70, head_dim=64, mask="float"): WIDE,
    Case(FLOAT16, 1, 4, 2, 50, 50, causal=True): NARROW,
    Case(FLOAT16, 1, 2, 1, 50, 80, causal=True, sinks=True): SPLIT,
    Case(BFLOAT16, 2, 2, 1, 32, 64, causal=True): NARROW,
}


UBSAN_CASES = [case for case in CASES if case.precision is FLOAT16]  # it compiles slowly


def kernel_name(case: Case) -> str:
    tiling = CASES[case]
    name = f"{case.precision.metal}_{case.head_dim}_bk{tiling.keys}_wn{tiling.simdgroups_per_row}"
    return f"steel_attention_{name}_mask_{'float' if case.mask == 'float' else 'bool'}"


@functools.cache
def library(mode: Mode) -> Library:
    only = {kernel_name(case) for case in UBSAN_CASES} if mode is Mode.UBSAN else None
    return Library.from_file(SOURCE, [mlx_include_dir()], mode, only)


def parameters(case: Case, tiling: Tiling) -> bytes:
    """The struct AttnParams of MLX's steel/attn/params.h."""
    sizes = (case.batch, case.heads, case.head_dim, case.queries, case.keys)
    num_tiles = [-(-case.queries // TILE_ROWS), -(-case.keys // tiling.keys)]
    num_full_tiles = [case.queries // TILE_ROWS, case.keys // tiling.keys]
    remainders = [case.queries % TILE_ROWS, case.keys % tiling.keys]
    group = case.heads // case.kv_heads
    head = struct.pack("=6if", *sizes, group, case.head_dim**-0.5)
    offset = case.keys - case.queries
    head += struct.pack("=7i", *num_tiles, *num_full_tiles, *remainders, offset)
    strides: list[int] = []
    for heads, rows in ((case.heads, case.queries), *[(case.kv_heads, case.keys)] * 2):
        strides += [heads * rows * case.head_dim, rows * case.head_dim, case.head_dim]
    strides += strides[:3]  # of the output
    return head + struct.pack("=12q", *strides)


def run(problem: Problem, mode: Mode, seed: int | None) -> tuple[Any, LaunchStats]:
    case = problem.case
    tiling = CASES[case]
    out = nan_filled(problem.q.shape, case.precision)
    arrays: list[Any] = [raw(problem.q), raw(problem.k), raw(problem.v), out]
    buffers: dict[int, Buffer] = dict(enumerate([*arrays, parameters(case, tiling)]))
    if problem.mask is not None:
        rows = case.queries * case.keys
        buffers[5] = np.array([case.heads * rows, rows, case.keys], np.int64)
        buffers[6] = raw(problem.mask)
    if problem.sinks is not None:
        buffers[7] = raw(problem.sinks)
    result = library(mode).launch(
        kernel_name(case),
        grid=(-(-case.queries // TILE_ROWS), case.heads, case.batch),
        threadgroup=(32, 4, tiling.simdgroups_per_row),
        buffers=buffers,
        constants={
            200: case.queries % TILE_ROWS == 0,
            201: case.keys % tiling.keys == 0,
            300: bool(case.mask),
            301: case.causal,
            302: case.sinks,
            303: False,  # save_lse
        },
        seed=seed,
    )
    return out, result.stats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "seed"),
    [(Mode.FAST, None), (Mode.FAST, 1), (Mode.FAST, 2), (Mode.RACE, None)],
    ids=["in order", "seed 1", "seed 2", "race"],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steel_attention(case: Case, mode: Mode, seed: int | None) -> None:
    assert_right(Problem(case), mode, seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", UBSAN_CASES, ids=str)
def test_no_undefined_behaviour(case: Case) -> None:
    assert_right(Problem(case), Mode.UBSAN, None)


def assert_right(problem: Problem, mode: Mode, seed: int | None) -> None:
    case = problem.case
    out, _ = run(problem, mode, seed)
    actual = to_float64(out, case.precision)
    assert relative_rms(actual, problem.in_float64()) < case.precision.tolerance
    assert relative_rms(actual, problem.by_mlx()) < 2 * case.precision.tolerance  # MLX rounds too


@pytest.mark.heavy
def test_threadgroup_bytes() -> None:
    """The sizes that the kernel's own arithmetic gives: 32 queries and 16 keys, padded."""
    _, stats = run(Problem(next(iter(CASES))), Mode.FAST, None)
    padding = 4
    assert stats.threadgroup_bytes == 4 * (32 * (128 + padding) + 128 * (16 + padding))
