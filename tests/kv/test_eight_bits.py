"""Arrays in 8 bits against float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kv.eight_bits import (
    LEAST_SCALE,
    MOST_STEPS,
    Rows8,
    can_be_stored,
    num_stored_bytes,
    row_length,
)

DTYPES = {mx.float32: 2**-24, mx.float16: 2**-11, mx.bfloat16: 2**-8}
"""With the largest relative error of rounding to the dtype."""
SHAPES = [(1, 3, 64), (1, 4, 16, 32), (1, 48, 8), (1, 5), (1, 1, 17), (1, 2, 3, 2)]


def drawn(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Rows of very different sizes."""
    rng = np.random.default_rng(len(shape))
    sizes = 10.0 ** rng.uniform(-4, 4, (*shape[:-1], 1))
    return mx.array((rng.standard_normal(shape) * sizes).astype(np.float32)).astype(dtype)


def in_float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


@pytest.mark.mac
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_element_is_off_by_more_than_half_a_step_of_its_row(shape, dtype):
    array = drawn(shape, dtype)
    stored = Rows8.of(array)
    expected, found = in_float64(array), in_float64(stored.array)
    assert stored.array.dtype == dtype and stored.array.shape == shape
    rows = expected.reshape(-1, row_length(shape))
    step = np.abs(rows).max(axis=1, keepdims=True) / MOST_STEPS
    error = np.abs(found.reshape(rows.shape) - rows)
    # Half a step, and the rounding to the dtype of numbers of at most so many steps.
    assert (error <= step * (0.5 + 2 * MOST_STEPS * DTYPES[dtype])).all()
    assert error.max() > 0.3 * step.min()


@pytest.mark.mac
def test_the_rows_of_zeros_and_of_faint_numbers():
    faint = 3.5 * LEAST_SCALE
    array = mx.array([[[0.0] * 16, [faint] * 16, [-0.0] * 15 + [1.0]]])
    stored = Rows8.of(array)
    found = np.array(stored.array)[0]
    assert (found[0] == 0).all() and (found[2] == np.array(array)[0, 2]).all()
    assert np.abs(found[1] - faint).max() <= LEAST_SCALE / 2
    assert np.array(stored.scales)[0] == LEAST_SCALE


@pytest.mark.mac
def test_infinities_and_nan_stay_and_change_no_other_element():
    row = [1.0, -2.0, *[0.5] * 14]
    odd = [np.inf, -2.0, -np.inf, np.nan, *row[4:]]
    found = np.array(Rows8.of(mx.array([[row, odd, [np.nan] * 16]])).array)[0]
    assert np.isnan(found[1]).tolist() == np.isnan(odd).tolist()
    assert (found[1, 0], found[1, 2]) == (np.inf, -np.inf)
    assert (found[1, 4:] == found[0, 4:]).all() and found[1, 1] == found[0, 1]
    assert np.isnan(found[2]).all()


def test_the_bytes_are_those_of_the_arrays():
    for shape in SHAPES:
        array = drawn(shape, mx.float32)
        stored = Rows8.of(array)
        assert num_stored_bytes(array) == stored.codes.nbytes + stored.scales.nbytes
        if array.size >= 16:
            assert 3 * num_stored_bytes(array) <= array.nbytes
    for array in (mx.zeros((1, 20), mx.int32), mx.zeros((1, 0))):
        assert not can_be_stored(array) and num_stored_bytes(array) == array.nbytes
