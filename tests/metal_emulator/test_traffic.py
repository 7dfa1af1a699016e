"""The bytes that kernels load and store, where the number is known."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .launch import LaunchStats, Lines, Operations, UniqueBytes
from .library import Library
from .modes import Mode

SOURCE = Path(__file__).with_name("traffic.metal")
THREADS = 256
GROUPS = 4
SIMDGROUPS = 2  # per threadgroup


@functools.cache
def library(mode: Mode) -> Library:
    return Library.from_file(SOURCE, mode=mode)


def run(
    kernel: str,
    *arrays: NDArray[Any],
    mode: Mode = Mode.RACE,
    seed: int = 1,
    constants: dict[int, int] | None = None,
) -> LaunchStats:
    result = library(mode).launch(
        kernel,
        grid=(GROUPS, 1, 1),
        threadgroup=(THREADS // GROUPS, 1, 1),
        buffers=dict(enumerate(arrays)),
        constants=constants,
        seed=seed,
    )
    return result.stats


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("type_name", "bytes_each"),
    [("float", 4), ("half", 2), ("char", 1), ("float4", 16), ("half4", 8)],
)
def test_each_byte_once(type_name: str, bytes_each: int) -> None:
    size = THREADS * bytes_each
    stats = run(f"each_once_{type_name}", *(np.zeros(size, np.uint8) for _ in range(2)))
    assert stats.loaded_bytes == {0: size, 1: 0}
    assert stats.stored_bytes == {0: 0, 1: size}
    assert stats.unique_loaded_bytes[0] == UniqueBytes(size, size, size)
    assert stats.unique_loaded_bytes[1] == UniqueBytes(0, 0, 0)


def test_three_elements_are_two_accesses() -> None:
    """Those of 4 and of 2 bytes: the sanitizer's pass knows no access of 6."""
    size = THREADS * 6
    stats = run("each_three", *(np.zeros(size, np.uint8) for _ in range(2)))
    assert stats.loaded_bytes == {0: size, 1: 0}
    assert stats.stored_bytes == {0: 0, 1: size}
    assert stats.unique_loaded_bytes[0] == UniqueBytes(size, size, size)


def test_every_lane_counts() -> None:
    stats = run("all_of_the_group", *(np.zeros(THREADS, np.float32) for _ in range(2)))
    assert stats.loaded_bytes[0] == THREADS * 64 * 4
    once = THREADS * 4
    assert stats.unique_loaded_bytes[0] == UniqueBytes(SIMDGROUPS * once, once, once)


def test_what_threadgroups_share() -> None:
    stats = run("one_per_simdgroup", np.zeros(2, np.float32), np.zeros(THREADS, np.float32))
    assert stats.loaded_bytes[0] == THREADS * 4
    assert stats.unique_loaded_bytes[0] == UniqueBytes(GROUPS * 2 * 4, GROUPS * 2 * 4, 2 * 4)


def test_read_and_write_of_one_element() -> None:
    stats = run("in_place", np.zeros(THREADS, np.float32))
    assert (stats.loaded_bytes, stats.stored_bytes) == ({0: THREADS * 4}, {0: THREADS * 4})


def test_atomics() -> None:
    total = np.zeros(1, np.uint32)
    stats = run("atomic_sum", total)
    assert total[0] == THREADS
    assert (stats.loaded_bytes, stats.stored_bytes) == ({0: THREADS * 4}, {0: THREADS * 4})


@pytest.mark.parametrize(
    ("type_name", "bytes_each", "lines"),
    [("char", 1, 1), ("half", 2, 1), ("float", 4, 1), ("half4", 8, 2), ("float4", 16, 4)],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_neighbours_share_lines(type_name: str, bytes_each: int, lines: int, seed: int) -> None:
    size = THREADS * bytes_each
    arrays = (np.zeros(size, np.uint8) for _ in range(2))
    stats = run(f"each_once_{type_name}", *arrays, seed=seed)
    simdgroups = SIMDGROUPS * GROUPS
    total = simdgroups * lines
    assert stats.lines[0] == Lines(simdgroups, total, 0, 0)
    assert stats.lines[1] == Lines(0, 0, simdgroups, total)


@pytest.mark.parametrize(("stride", "lines"), [(1, 1 + 1), (2, 2 + 1), (3, 3 + 2), (32, 32 + 16)])
def test_lines_of_strided_loads(stride: int, lines: int) -> None:
    arrays = np.zeros(32 * 32, np.float32), np.zeros(THREADS, np.float32)
    stats = run("strided", *arrays, constants={0: stride})
    simdgroups = SIMDGROUPS * GROUPS
    assert stats.lines[0] == Lines(2 * simdgroups, lines * simdgroups, 0, 0)


def test_each_pass_of_a_loop_is_an_instruction() -> None:
    """Whether the lanes meet in it or run through all of it one after another."""
    arrays = np.zeros(THREADS, np.float32), np.zeros(THREADS, np.float32)
    simdgroups = SIMDGROUPS * GROUPS
    assert run("reduced", *arrays).lines[0].load_instructions == 3 * simdgroups
    assert run("all_of_the_group", *arrays).lines[0] == Lines(
        64 * simdgroups, 64 * simdgroups, 0, 0
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", [Mode.FAST, Mode.RACE])
def test_reductions_and_barriers(mode: Mode) -> None:
    arrays = np.zeros(THREADS, np.float32), np.zeros(THREADS, np.float32)
    stats = run("reduced", *arrays, mode=mode)
    simdgroups = SIMDGROUPS * GROUPS
    assert (stats.simd_reductions, stats.simd_ops) == (4 * simdgroups, 6 * simdgroups)
    assert (stats.barriers, stats.threadgroups, stats.threads) == (GROUPS, GROUPS, THREADS)


def test_neighbours_are_one_load() -> None:
    stats = run("neighbours", np.zeros(4 * THREADS, np.float16), np.zeros(THREADS, np.float32))
    simdgroups = SIMDGROUPS * GROUPS
    assert stats.lines[0] == Lines(simdgroups, 2 * simdgroups, 0, 0)
    assert stats.loaded_bytes[0] == 4 * THREADS * 2


@pytest.mark.parametrize("seed", [1, 2])
def test_operations_of_all_lanes_together_and_of_each(seed: int) -> None:
    arrays = [*(np.zeros(THREADS, np.float32) for _ in range(2)), np.array([1], np.int64)]
    stats = run("operations", *arrays, seed=seed)
    simdgroups = SIMDGROUPS * GROUPS
    assert stats.operations == {
        "exponential": Operations(5 * simdgroups, 4 * THREADS + THREADS // 2),
        "multiply_64": Operations(simdgroups, THREADS),
    }


def test_matrix_products() -> None:
    """A matrix is loaded, multiplied by itself and stored. Its rows are found without 64 bits."""
    simdgroups = SIMDGROUPS * GROUPS
    stats = run("product", np.ones(72, np.float32), np.zeros(64 * simdgroups, np.float32))
    counts = stats.matrix_multiplications, stats.matrix_accesses, stats.simd_ops
    assert counts == (simdgroups, 2 * simdgroups, 3 * simdgroups)
    assert stats.operations["multiply_64"].by_lanes == 0


def test_other_modes_do_not_count() -> None:
    stats = run("in_place", np.zeros(THREADS, np.float32), mode=Mode.FAST)
    assert (stats.threads, stats.loaded_bytes, stats.operations) == (THREADS, {}, {})
