"""Launches MLX's decode kernels as MLX's own host code does."""

from pathlib import Path
from typing import Any

import numpy as np

from .attention_cases import Case, Problem, nan_filled, raw
from .launch import Buffer, LaunchStats
from .library import Library

SOURCE = Path(__file__).with_name("mlx_sdpa_vector.metal")
NUM_BLOCKS = 32  # of the two-pass kernels, by default: how many threadgroups share one row


def function_constants(case: Case, num_blocks: int = NUM_BLOCKS) -> dict[int, int | bool]:
    return {
        20: bool(case.mask),
        21: False,  # query_transposed
        22: case.causal,
        23: case.mask == "bool",
        24: case.mask == "float",
        25: case.sinks,
        26: num_blocks,
    }


def optional_buffers(problem: Problem, first: int) -> dict[int, Buffer]:
    """Masks and sinks, as every kernel takes them from index `first` on."""
    case = problem.case
    buffers: dict[int, Buffer] = {}
    if problem.mask is not None:
        buffers[first if case.mask == "bool" else first + 1] = raw(problem.mask)
        head_stride = case.queries * case.keys if problem.mask.shape[1] > 1 else 0
        strides = (1, case.keys, head_stride)  # key, query, head
        buffers |= {first + 2 + i: np.int32(stride) for i, stride in enumerate(strides)}
    if problem.sinks is not None:
        buffers[first + 5] = raw(problem.sinks)
    return buffers


def shared_buffers(problem: Problem, first: int) -> dict[int, Buffer]:
    """q, k and v, then number of keys, strides and scale from index `first` on."""
    case = problem.case
    arrays = (problem.q, problem.k, problem.v)
    strides = [np.uint64(case.keys * case.head_dim), np.uint64(case.head_dim)]
    values: list[Buffer] = [np.int32(case.keys), *strides, *strides, np.float32(problem.scale)]
    return dict(enumerate(map(raw, arrays))) | dict(enumerate(values, start=first))


def run_one_pass(
    problem: Problem, library: Library, seed: int | None = None
) -> tuple[Any, LaunchStats]:
    case = problem.case
    out = nan_filled(problem.q.shape, case.precision)
    buffers = shared_buffers(problem, first=5) | optional_buffers(problem, first=11)
    buffers |= {3: out, 4: np.int32(case.heads // case.kv_heads)}
    if case.sinks:
        buffers[17] = np.int32(case.heads)
    result = library.launch(
        f"sdpa_vector_{case.precision.metal}_{case.head_dim}",
        grid=(case.batch * case.heads, case.queries, 1),
        threadgroup=(1024, 1, 1),
        buffers=buffers,
        constants=function_constants(case),
        seed=seed,
    )
    return out, result.stats


def run_two_pass(
    problem: Problem,
    library: Library,
    seed: int | None = None,
    heads_per_simdgroup: int | None = None,
    num_blocks: int = NUM_BLOCKS,
) -> tuple[Any, list[LaunchStats]]:
    """Returns the output and the statistics of both passes."""
    case = problem.case
    group = case.heads // case.kv_heads
    rows = case.batch * case.heads * case.queries
    partials = nan_filled((rows, num_blocks, case.head_dim), case.precision)
    sums, maxima = (np.full((rows, num_blocks), np.nan, np.float32) for _ in range(2))
    buffers = shared_buffers(problem, first=7) | optional_buffers(problem, first=13)
    suffix = f"{case.precision.metal}_{case.head_dim}"
    kernel = f"2pass_1_{suffix}"
    if heads_per_simdgroup:
        kernel = f"2pass_1_gqa_{suffix}_{group}_{heads_per_simdgroup}"
    first = library.launch(
        f"sdpa_vector_{kernel}",
        grid=(case.kv_heads, case.batch, num_blocks),
        threadgroup=(32, group, case.queries),
        buffers=buffers | {3: partials, 4: sums, 5: maxima},
        constants=function_constants(case, num_blocks),
        seed=seed,
    )
    out = nan_filled(problem.q.shape, case.precision)
    second = library.launch(
        f"sdpa_vector_2pass_2_{suffix}",
        grid=(case.batch * case.heads, case.queries, 1),
        threadgroup=(1024, 1, 1),
        buffers={0: partials, 1: sums, 2: maxima, 3: out, 4: np.int32(num_blocks)},
        constants=function_constants(case, num_blocks),
        seed=seed,
    )
    return out, [first.stats, second.stats]
