"""Low-rank terms of linear layers, of other weights for each row; files of their factors."""

from typing import Any

import mlx.core as mx

from mlx_paged import _ext

StoredFactor = tuple[int, str, tuple[int, ...], bool, float, mx.Dtype]
"""A tensor of a file, as :func:`read_factors` takes it."""

read_factors = _ext.layers.read_factors
write_slot = _ext.layers.write_slot


def times_weight(layer: Any, x: mx.array) -> mx.array:
    """The product of `x` and the weight of one of MLX's linear layers, without its bias."""
    if not hasattr(layer, "bits"):
        product: mx.array = x @ layer["weight"].T
        return product
    sizes = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    factors = layer["weight"], layer["scales"], layer.get("biases")
    return mx.quantized_matmul(x, *factors, transpose=True, **sizes)


def add_low_rank_terms(
    y: mx.array, x: mx.array, a: mx.array, b: mx.array, slots: mx.array
) -> mx.array:
    """``y + (x @ a[s].T) @ b[s]`` in the rows whose slot s is not negative; the other rows as they
    are, bit for bit (LoRA; Hu et al. 2021, arXiv:2106.09685, section 4.1).

    Args:
        y: ``[..., O]``, T rows.
        x: ``[..., I]``, as many rows.
        a: ``[S, r, I]``.
        b: ``[S, r, O]``, of a's dtype.
        slots: ``[T]`` int32, below S.
    """
    assert y.size == len(slots) * y.shape[-1], "a layer computes other rows than the step has"
    return _added(y, x, a, b, slots)


def add_expert_terms(
    y: mx.array, x: mx.array, a: mx.array, b: mx.array, slots: mx.array, experts: mx.array
) -> mx.array:
    """``y + (x @ a[s, e].T) @ b[s, e]`` in the rows of a layer of experts whose slot s is not
    negative; the other rows as they are.

    Args:
        a: ``[S, E, r, I]``.
        b: ``[S, E, r, O]``.
        slots: int32, of the shape of `experts`.
        experts: the expert of each row of `y`, ``[..., k]`` below E.
    """
    index = mx.where(slots >= 0, slots * a.shape[1] + experts.astype(mx.int32), -1)
    return _added(y, x, a.flatten(0, 1), b.flatten(0, 1), index)


def _added(y: mx.array, x: mx.array, a: mx.array, b: mx.array, index: mx.array) -> mx.array:
    """``y + (x @ a[i].T) @ b[i]`` in the rows whose `index` i is not -1; the others as they are."""
    if mx.default_device() != mx.cpu:
        rows = x if index.ndim > 1 else x.reshape(-1, 1, x.shape[-1])
        own = mx.maximum(index, 0).astype(mx.uint32)
        first = mx.gather_mm(rows, a.swapaxes(-1, -2), rhs_indices=own)
        terms = mx.gather_mm(first, b, rhs_indices=own).reshape(y.shape)
        has_term = (index >= 0).reshape(*y.shape[:-1], 1)
        return mx.where(has_term, y + terms.astype(y.dtype), y)
    if not y.dtype == x.dtype == a.dtype:  # a layer of float32 beside weights of 16 bits
        y32, *others = (each.astype(mx.float32) for each in (y, x, a, b))
        return _ext.layers.low_rank_terms(y32, *others, index).astype(y.dtype)
    return _ext.layers.low_rank_terms(y, x, a, b, index)
