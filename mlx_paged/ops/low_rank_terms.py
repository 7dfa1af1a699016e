"""Low-rank terms of linear layers, of other weights for each row."""

import mlx.core as mx

from mlx_paged import _ext


def add_low_rank_terms(
    y: mx.array, x: mx.array, a: mx.array, b: mx.array, slots: mx.array
) -> mx.array:
    """``y + (x @ a[s].T) @ b[s].T`` in the rows whose slot s is not negative; the other rows as
    they are, bit for bit (LoRA; Hu et al. 2021, arXiv:2106.09685, section 4.1).

    Args:
        y: ``[..., O]``, T rows.
        x: ``[..., I]``, of y's dtype, as many rows.
        a: ``[S, r, I]``, of y's dtype.
        b: ``[S, O, r]``, of y's dtype.
        slots: ``[T]`` int32, below S.
    """
    rows = x.reshape(-1, 1, x.shape[-1])
    assert len(rows) == len(slots), "a layer computes other rows than the step has"
    terms = _products(_products(rows, a, slots), b, slots).reshape(y.shape)
    has_term = (slots >= 0).reshape(*y.shape[:-1], 1)
    return mx.where(has_term, y + terms.astype(y.dtype), y)


def add_expert_terms(
    y: mx.array, x: mx.array, a: mx.array, b: mx.array, slots: mx.array, experts: mx.array
) -> mx.array:
    """The same for a layer of experts: ``[..., 1, I]`` times ``a[s, e]`` and ``b[s, e]``.

    Args:
        a: ``[S, E, r, I]``.
        b: ``[S, E, O, r]``.
        slots: int32, of the shape of `experts`.
        experts: the expert of each row of `y`, ``[..., k]`` below E.
    """
    has_term = slots >= 0
    index = mx.where(has_term, slots * a.shape[1] + experts.astype(mx.int32), -1)
    terms = _products(_products(x, a.flatten(0, 1), index), b.flatten(0, 1), index)
    return mx.where(has_term[..., None, None], y + terms.astype(y.dtype), y)


def _products(x: mx.array, weights: mx.array, index: mx.array) -> mx.array:
    """``x @ weights[i].T`` of each row, whose values are any if i is -1."""
    if mx.default_device() != mx.cpu:
        index = mx.maximum(index, 0).astype(mx.uint32)
        return mx.gather_mm(x, weights.swapaxes(-1, -2), rhs_indices=index)
    if x.dtype != weights.dtype:  # a layer that computes in float32 beside weights of 16 bits
        x, weights = x.astype(mx.float32), weights.astype(mx.float32)
    return _ext.layers.switch_linear(x, index, weights)
