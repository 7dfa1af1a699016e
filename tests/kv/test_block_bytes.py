"""Whole blocks of a pool as bytes, and back."""

from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.kv.block_bytes import Staging, bytes_of, read_blocks, write_blocks
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv.shapes import KVShape


def test_what_is_read_is_what_was_written():
    for dtype, shape in [
        (mx.float16, (2, 8, 8)),
        (mx.bfloat16, (3, 5, 7)),
        (mx.float32, (1, 1, 1)),
    ]:
        for latent in (False, True) if shape[1] == 8 else (False,):
            shapes = [KVShape(*shape, dtype)] * 2
            if latent:
                shapes = [KVShape(1, 24, 16, dtype, latent=True)] * 2
            pool = KVPool(shapes, 10, 16)
            for layer in range(2):
                rows = [
                    mx.random.normal((160, shapes[0].n_kv_heads, dim)).astype(dtype)
                    for dim in shapes[0].row_dims
                ]
                pool.write(layer, *rows, mx.arange(160, dtype=mx.int32))
            before = [np.array(array.astype(mx.float32)) for array in pool.handles()]
            held = pool.handles()[0]
            write_blocks(
                pool, np.array([1, 9], np.int32), 0, np.array(read_blocks(pool, [3, 7], 0))
            )
            mx.eval(pool.handles())
            for old, array in zip(before, pool.handles(), strict=True):
                old[:, [1, 9]] = old[:, [3, 7]]
                np.testing.assert_array_equal(np.array(array.astype(mx.float32)), old)
            in_place = np.array(held.astype(mx.float32)) == before[0]
            assert in_place.all() or shape[1] != 8, "the pool was copied"


def test_quantized_arrays_are_read_and_written_too():
    pool = KVPool([KVShape(2, 8, 8, mx.float16)], 6, 4)
    for dtype, columns in [(mx.int8, 8), (mx.uint16, 6), (mx.uint8, 5), (mx.float16, 1)]:
        array = mx.random.randint(0, 100, (6, 2, 4, columns)).astype(dtype).transpose(1, 0, 2, 3)
        mx.eval(array)
        handles = [array]
        with mock.patch.object(pool, "arrays_of", lambda group, h=handles: [(h, 0)]):
            before = np.array(array)
            write_blocks(
                pool, np.array([4, 0], np.int32), 0, np.array(read_blocks(pool, [1, 2], 0))
            )
        before[:, [4, 0]] = before[:, [1, 2]]
        np.testing.assert_array_equal(np.array(handles[0]), before)


def test_arrays_that_do_not_begin_at_a_whole_element_are_written_too():
    pool = KVPool([KVShape(2, 8, 8, mx.float16)], 6, 4)
    shapes = {(6, 1, 3, 5): mx.uint8, (6, 1, 3, 2): mx.float16}
    handles = [mx.random.randint(0, 100, shape).astype(dtype) for shape, dtype in shapes.items()]
    handles = [array.transpose(1, 0, 2, 3) for array in handles]
    mx.eval(handles)
    before = [np.array(array) for array in handles]
    with mock.patch.object(pool, "arrays_of", lambda group: [(handles, 0), (handles, 1)]):
        stored = np.array(read_blocks(pool, [1, 2], 0))
        assert stored.shape == (2, 15 + 12)
        write_blocks(pool, np.array([4, 0], np.int32), 0, stored)
    for old, array in zip(before, handles, strict=True):
        old[:, [4, 0]] = old[:, [1, 2]]
        np.testing.assert_array_equal(np.array(array), old)


@pytest.mark.parametrize(("heads", "size", "dim"), [(2, 4, 8), (1, 3, 7)], ids=["op", "no op"])
def test_rows_for_no_block_are_left_out(heads, size, dim):
    pool = KVPool([KVShape(heads, dim, dim, mx.float32)], 6, size)
    rows = mx.random.normal((2, 6 * size, heads, dim))
    pool.write(0, *rows, mx.arange(6 * size, dtype=mx.int32))
    before, stored = np.array(pool.k[0]), np.array(read_blocks(pool, range(6), 0))
    rows, memory = Staging(stored.size).rows(3, 2 * stored.shape[1])  # of two blocks each
    memory[:] = stored.reshape(3, -1)
    write_blocks(pool, np.array([5, 4, -1, -1, 1, -1], np.int32), 0, rows)
    expected = before.copy()
    expected[:, [5, 4, 1]] = before[:, [0, 1, 4]]
    np.testing.assert_array_equal(np.array(pool.k[0]), expected)


def test_blocks_are_written_without_a_copy_of_their_own():
    pool = KVPool([KVShape(2, 64, 64, mx.float32)] * 2, 64, 16)
    size = read_blocks(pool, [0], 0).shape[1]
    rows, memory = Staging(32 * size).rows(32, size)
    memory[:] = 5
    mx.eval(rows)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    write_blocks(pool, np.arange(32, dtype=np.int32), 0, rows)
    mx.eval(pool.handles())
    assert mx.get_peak_memory() - before < rows.nbytes / 4
    assert np.array(pool.k[1])[:, :32].view(np.uint8).min() == 5


def test_staging_memory_has_one_user_at_a_time():
    staging = Staging(100)
    first, memory = staging.rows(4, 25)
    memory[:] = 1
    for count in (4, 5):
        other, others = staging.rows(count, 20)
        others[:] = 2
        assert np.array(other).min() == 2
    assert np.array(first).min() == 1, "rows in use were given away"
    del first, memory, other, others
    assert isinstance(staging.rows(5, 20)[0], mx.array), "the memory is not used again"
    assert isinstance(staging.rows(5, 21)[0], np.ndarray), "there is not so much of it"


def test_bytes_of_a_copy_that_failed_are_not_read(monkeypatch):
    """NumPy alone may swallow the error, and return garbage."""

    def refused(*arrays):
        raise RuntimeError("planted")

    copied = mx.zeros((2, 8), mx.uint8)
    monkeypatch.setattr(mx, "eval", refused)
    for read in (lambda: bytes_of(copied, 0, 1), lambda: ops.as_numpy(copied)):
        with pytest.raises(RuntimeError, match="planted"):
            read()
