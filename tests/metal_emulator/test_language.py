"""Metal's language and library on the CPU mean what they mean on a GPU."""

import functools
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from .library import Library
from .modes import Mode

SOURCE = Path(__file__).with_name("language.metal")
ONE = (1, 1, 1)

every_mode = pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)


@functools.cache
def library(mode: Mode = Mode.FAST) -> Library:
    return Library.from_file(SOURCE, mode=mode)


def run_single(kernel: str, out: NDArray[Any], *more: NDArray[Any], mode: Mode = Mode.FAST) -> None:
    buffers = dict(enumerate([out, *more]))
    library(mode).launch(kernel, grid=ONE, threadgroup=ONE, buffers=buffers)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "uint16", "int32", "uint32", "int64", "bool", "uint8"]
)
def test_dtypes(dtype: str) -> None:
    values = np.array([[0, 1, 2], [100, 3, 1]]).astype(dtype)
    out = np.zeros_like(values)
    library().launch(
        f"copy_{dtype}",
        grid=(6, 1, 1),
        threadgroup=(4, 1, 1),
        buffers={0: values, 1: out},
        grid_in_threads=True,
    )
    np.testing.assert_array_equal(out, values)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@every_mode
def test_every_operation_rounds(dtype: mx.Dtype, mode: Mode) -> None:
    rng = np.random.default_rng(0)
    a, b = (mx.array(rng.standard_normal(1024)).astype(dtype) for _ in range(2))
    product, quotient = a * b, a / b
    expected = product + quotient
    raw = [np.array(x.view(mx.uint16) if dtype == mx.bfloat16 else x) for x in (a, b, expected)]
    out = np.zeros_like(raw[2])
    name = str(dtype).removeprefix("mlx.core.")
    library(mode).launch(
        f"arithmetic_{name}",
        grid=ONE,
        threadgroup=(1024, 1, 1),
        buffers={0: raw[0], 1: raw[1], 2: out},
    )
    np.testing.assert_array_equal(out, raw[2])


def test_literals() -> None:
    out = np.zeros(5, np.float32)
    run_single("literals", out)
    np.testing.assert_allclose(out, [1, 4, 2, 3, 1], rtol=1e-6)


def test_sizes_and_alignments() -> None:
    out = np.zeros(8, np.int32)
    run_single("sizes", out)
    assert out.tolist() == [8008, 16016, 16016, 8008, 12004, 4004, 8008, 8008]


@every_mode
def test_vectors(mode: Mode) -> None:
    out = np.zeros((9, 4), np.float32)
    run_single("vectors", out, mode=mode)
    assert out.tolist() == [
        [4, 3, 2, 1],
        [1, 2, 3, 3],
        [9, 8, 3, 4],
        [17, 15, 5, -1],
        [9.5, 8.5, 3.5, 4.5],
        [0, 0, 3, 0],
        [81 + 64 + 9 + 16, 5, 1, 1],
        [9, 8, 9, 9],
        [9, 8, 12, 18],
    ]


def test_numbers() -> None:
    x = np.float32(1.7)
    out = np.zeros(19, np.float32)
    run_single("numbers", out, np.array([x, np.nan], np.float32))
    expected = [
        *(np.exp(x), np.exp2(x), np.log(x), 1 / np.sqrt(x), np.tanh(x), 1, x**2.5, x * x + 1),
        *(3 + 2, 1 + 2 + 4, 31 + 8 + 3, 3 + 0xBC, -x, 7 + 2 + 10, -1 + 0.25 + 2),
        *(65504 + 2**-7, 8 * x - 2),
        *(1, np.nan),  # of fast exponentials of NaN and -inf, which promise nothing
    ]
    np.testing.assert_allclose(out, np.array(expected, np.float32), rtol=3e-7)


@pytest.mark.parametrize("seed", [None, 1, 2])
@every_mode
def test_lanes(mode: Mode, seed: int | None) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-50, 50, (2, 32)).astype(np.int32)
    out = np.zeros((2, 32, 18), np.int32)
    library(mode).launch(
        "lanes", grid=ONE, threadgroup=(64, 1, 1), buffers={0: x, 1: out}, seed=seed
    )
    for group in range(2):
        np.testing.assert_array_equal(out[group], expected_lanes(x[group]))


def expected_lanes(x: NDArray[np.int32]) -> NDArray[np.int64]:
    """What kernel `lanes` writes, row by row of lanes."""
    lane = np.arange(32)
    filled_down = np.concatenate([x[2:], -x[:2]])
    filled_up = np.concatenate([[*-part[-2:], *part[:-2]] for part in x.reshape(4, 8)])
    votes = np.int64(sum(1 << int(i) for i in lane if x[i] > 0)).astype(np.int32)
    columns = [
        *(x.sum(), x.max(), x.min(), np.cumsum(x), np.cumsum(x) - x),
        *(x[31 - lane], x[lane ^ 5], x[np.where(lane < 29, lane + 3, lane)]),
        *(x[np.where(lane >= 3, lane - 3, lane)], np.roll(x, -3), x[7], x[0], votes),
        *(1 + 4 * (lane == 0), np.bitwise_xor.reduce(x), filled_down, filled_up),
        np.repeat(x.reshape(8, 4).sum(axis=1), 4),
    ]
    return np.stack([np.broadcast_to(column, 32) for column in columns], axis=1)


@every_mode
def test_matrices(mode: Mode) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((8, 10), np.float32), rng.standard_normal((8, 8), np.float32)
    out = np.zeros((8, 8), np.float32)
    library(mode).launch(
        "matrices",
        grid=ONE,
        threadgroup=(32, 1, 1),
        buffers={0: a, 1: b, 2: out},
        threadgroup_bytes={0: 256},
    )
    np.testing.assert_allclose(out, a[:, :8] @ b.T + 2 * np.eye(8), rtol=1e-5, atol=1e-6)


@every_mode
def test_atomics(mode: Mode) -> None:
    values = np.random.default_rng(0).integers(-50, 50, 256).astype(np.int32)
    out, bits = np.zeros(5, np.int32), np.zeros(1, np.uint32)
    library(mode).launch(
        "atomics",
        grid=(4, 1, 1),
        threadgroup=(64, 1, 1),
        buffers={0: values, 1: out, 2: bits},
        seed=1,
    )
    assert out.tolist() == [values.sum(), values.max(), values.min(), 7, 1]
    assert bits[0] == 0xFFFFFFFF


def test_positions_in_a_grid_that_no_threadgroup_divides() -> None:
    grid, threadgroup = (10, 5, 3), (4, 3, 2)
    out = np.zeros((3, 5, 10, 16), np.uint32)
    result = library().launch(
        "positions", grid=grid, threadgroup=threadgroup, buffers={0: out}, grid_in_threads=True
    )
    assert result.stats.threads == 150

    def number(triple: Any) -> int:
        return int(triple[0] + 100 * triple[1] + 10000 * triple[2])

    for z, y, x in np.ndindex(3, 5, 10):
        place = np.array([x, y, z])
        group, inside = place // threadgroup, place % threadgroup
        size = np.minimum(threadgroup, grid - group * threadgroup)
        index = int(inside[0] + size[0] * (inside[1] + size[1] * inside[2]))
        assert out[z, y, x, :10].tolist() == [
            *(number(inside), number(group), number((3, 2, 2)), number(size), number(threadgroup)),
            *(index, index % 32, index // 32, -(-int(size.prod()) // 32), 32),
        ]


@pytest.mark.parametrize("derived", [True, False])
def test_function_constants(derived: bool) -> None:
    out = np.zeros(6, np.float32)
    buffers = {0: out, 1: np.array([42], np.float32)} if derived else {0: out}
    library().launch(
        "constants",
        grid=ONE,
        threadgroup=ONE,
        buffers=buffers,
        constants={0: True, 1: 7 if derived else -7, 2: 2**32 - 1, 3: 0.1, 4: 0.1},
    )
    half = np.float32(np.float16(0.1))
    count = 7 if derived else -7
    expected = [1, count, 2**32 - 1, 0.1, half, 42 if derived else -1]
    np.testing.assert_array_equal(out, np.array(expected, np.float32))


def test_address_spaces() -> None:
    out = np.zeros(1, np.int32)
    run_single("address_spaces", np.array([3, 4], np.int32), out, np.array([10, 20], np.int32))
    assert out[0] == (7 + 30) + 7


def test_one_array_at_two_indices_is_one_buffer() -> None:
    values = np.arange(4, dtype=np.int32)
    library().launch("add", grid=(4, 1, 1), threadgroup=ONE, buffers={0: values, 1: values})
    assert values.tolist() == [0, 2, 4, 6]
