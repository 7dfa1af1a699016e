"""Whole blocks of a pool as bytes, whatever the arrays of the pool hold."""

from collections.abc import Sequence
from math import gcd
from typing import Any
from weakref import ref

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import ops
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv.pool import KVPool, as_int32
from mlx_paged.ops.fallback import with_blocks
from mlx_paged.ops.formats import format_of

ROW_LENGTH = 1024  # elements at most of the rows in which blocks are written


def read_blocks(pool: KVPool, blocks: Sequence[int], group: int) -> mx.array:
    """A copy of these blocks in all arrays of a layer group, ``[n, bytes]`` uint8. MLX computes the
    copy already when this returns, so no later write changes the copy."""
    indices = as_int32(blocks)
    parts = [mx.zeros((len(blocks), 0), mx.uint8)]
    for handles, layer in pool.arrays_of(group):
        parts.append(ops.take_from_pool(_rows(handles[layer]), indices).view(mx.uint8))
    staged = mx.concatenate(parts, axis=1)
    # What is under way would hold the arrays that plain MLX writes to.
    begin = mx.async_eval if pool.in_place else mx.eval
    begin(staged)
    pool.settle()
    return staged


class Staging:
    """Memory for blocks that come into the pool, used again and again: new memory is slower."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = ops.pool_zeros((num_bytes,), mx.uint8)
        mx.eval(self._memory)
        self._rows = ref(self._memory[:0])  # the rows in use; dead when nobody uses rows any more

    def rows(self, count: int, num_bytes: int) -> tuple[Any, npt.NDArray[np.uint8]]:
        """Memory ``[count, num_bytes]`` twice: for :func:`write_blocks`, and for numpy to fill."""
        size = count * num_bytes
        if size > self._memory.size or self._rows() is not None:
            return (np.empty((count, num_bytes), np.uint8),) * 2
        rows = self._memory[:size].reshape(count, num_bytes)
        self._rows = ref(rows)
        return rows, np.asarray(self._memory)[:size].reshape(count, num_bytes)


def write_blocks(pool: KVPool, blocks: Int32Array, group: int, data: Any) -> None:
    """Write `data`, an array of MLX or numpy that :func:`read_blocks` returned, to these blocks,
    before any later read of the blocks. Data for block -1 is not written. A row of `data` may be
    the content of several blocks."""
    data = mx.array(data) if isinstance(data, np.ndarray) else data  # of MLX's own, no copy
    staged, start = data.reshape(len(blocks), -1), 0
    for handles, layer in pool.arrays_of(group):
        if pool.in_place:
            written = _written(handles[layer], blocks, staged, start)
        else:
            written = _plainly_written(handles[layer], blocks, staged, start)
        if handles is pool.k:
            pool.set_keys(layer, written)
        else:
            handles[layer] = written
        if start == 0:  # the device begins while the other writes are laid out
            mx.async_eval(written)  # type: ignore[no-untyped-call]
        start += written[:, 0].nbytes
    mx.async_eval(pool.handles())  # type: ignore[no-untyped-call]


def load_blocks(pool: KVPool, group: int, loads: Sequence[BlockTransfer]) -> None:
    """Write blocks of a layer group, which are rows of few arrays."""
    for rows in {id(t.payload[0]): t.payload[0] for t in loads}.values():
        found = [t for t in loads if t.payload[0] is rows]
        indices = [t.payload[1] for t in found]
        if isinstance(rows, np.ndarray):  # which is copied
            rows, indices = rows[indices], list(range(len(found)))
        blocks = np.full((rows.shape[0], len(loads[0].blocks)), -1, np.int32)
        blocks[indices] = [t.blocks for t in found]
        write_blocks(pool, blocks.reshape(-1), group, rows)


def bytes_of(staged: mx.array, start: int, count: int) -> npt.NDArray[np.uint8]:
    """Some rows of a copy of blocks, when it is there."""
    content: npt.NDArray[np.uint8] = ops.as_numpy(staged)
    return content[start : start + count].reshape(-1)


def _rows(cache: mx.array) -> mx.array:
    """``[num_blocks, elements of a block]``, a view of an array of the pool."""
    return cache.transpose(1, 0, 2, 3).reshape(cache.shape[1], -1)


def _written(cache: mx.array, blocks: Int32Array, staged: mx.array, start: int) -> mx.array:
    """A handle of `cache` after the columns of `staged` from `start` on were written.

    The compiled op for rows of K/V writes them in place: the first half of a row as its keys, the
    second half as its values. Without a compiled op the handle is of a new array.
    """
    num_blocks = cache.shape[1]
    stop = start + cache[:, 0].nbytes
    is_even = (stop - start) % 2 == 0
    dtype = mx.float16 if format_of(cache).has_scales and is_even else cache.dtype
    if start % dtype.size or staged.shape[1] % dtype.size:
        data = staged[:, start:stop].view(dtype)
    else:  # copies nothing
        data = staged.view(dtype)[:, start // dtype.size : stop // dtype.size]
    width = gcd(data.shape[1], ROW_LENGTH)
    cells = _rows(cache).view(dtype).reshape(num_blocks, -1, 1, width).transpose(1, 0, 2, 3)
    rows, slots = data.reshape(len(blocks), -1, width), as_int32(blocks)
    k_cells, v_cells = mx.split(cells, [width // 2], axis=-1)
    if width > 1 and ops.writes_in_place(rows, k_cells, v_cells, slots):
        k, v = mx.split(rows, 2, axis=-1)
        written = ops.write_kv(k, v, k_cells, v_cells, slots)
        handle: mx.array = mx.depends([cache], list(written))[0]
        return handle
    return _plainly_written(cache, blocks, staged, start)


def _plainly_written(cache: mx.array, blocks: Int32Array, staged: mx.array, start: int) -> mx.array:
    """As :func:`_written`, by a scatter; MLX takes the memory of `cache` if nothing else has it."""
    heads, _, size, dim = cache.shape
    chosen = np.flatnonzero(blocks >= 0)
    stop = start + cache[:, 0].nbytes
    content = staged[:, start:stop].view(cache.dtype)[mx.array(chosen)]
    content = content.reshape(len(chosen), heads, size, dim)
    return with_blocks(cache, as_int32(blocks[chosen]), content)
