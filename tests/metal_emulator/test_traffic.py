"""The bytes that kernels load and store, where the number is known."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .launch import LaunchStats, UniqueBytes
from .library import Library
from .modes import Mode

SOURCE = Path(__file__).with_name("traffic.metal")
THREADS = 256
GROUPS = 4
SIMDGROUPS = 2  # per threadgroup


@functools.cache
def library(mode: Mode) -> Library:
    return Library.from_file(SOURCE, mode=mode)


def run(kernel: str, *arrays: NDArray[Any], mode: Mode = Mode.RACE, seed: int = 1) -> LaunchStats:
    result = library(mode).launch(
        kernel,
        grid=(GROUPS, 1, 1),
        threadgroup=(THREADS // GROUPS, 1, 1),
        buffers=dict(enumerate(arrays)),
        seed=seed,
    )
    return result.stats


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


def test_other_modes_do_not_count() -> None:
    stats = run("in_place", np.zeros(THREADS, np.float32), mode=Mode.FAST)
    assert (stats.threads, stats.loaded_bytes) == (THREADS, {})
