"""Whether the device changes the arrays of a pool in place, or plain MLX changes them."""

from collections.abc import Iterable

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.kv.shapes import KVShape


def are_written_in_place(shapes: Iterable[KVShape | None], block_size: int) -> bool:
    """Whether the default device writes the rows of all these layers by a kernel. It asks the GPU's
    compiler."""
    stored = [shape for shape in dict.fromkeys(shapes) if shape is not None]
    return all([_is_written_in_place(shape, block_size) for shape in stored])


def _is_written_in_place(shape: KVShape, size: int) -> bool:
    k = mx.zeros((1, shape.n_kv_heads, shape.row_dims[0]), shape.dtype)
    slots, scaled = mx.zeros((1,), mx.int32), shape.kv_bits is not None
    return ops.writes_in_place(k, *_targets_of(shape, size), slots, scaled)


def is_copied_in_place(shape: KVShape) -> bool:
    """Whether the default device copies blocks of such a layer by a kernel. It asks the GPU's
    compiler."""
    return ops.copies_in_place(*_targets_of(shape, 1), mx.zeros((1, 2), mx.int32))


def _targets_of(shape: KVShape, size: int) -> tuple[mx.array, mx.array]:
    """Keys and values of one block, as a pool's ops take them; they are not evaluated."""
    k, v = (
        mx.zeros((shape.n_kv_heads, 1, size, form.columns(dims)), form.dtype)
        for form, dims in zip(shape.formats, shape.row_dims, strict=True)
    )
    return k, v
