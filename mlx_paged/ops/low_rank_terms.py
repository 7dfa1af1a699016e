"""Low-rank terms of linear layers, of other weights for each row; files of their factors."""

from functools import cached_property
from typing import Any, Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import _ext

StoredFactor = tuple[int, str, tuple[int, ...], bool, float, mx.Dtype]
"""A tensor of a file, as :func:`read_factors` takes it."""

read_factors = _ext.layers.read_factors
write_slot = _ext.layers.write_slot


class RowSlots:
    """The slots of rows, int32; -1: a row has no term. On a GPU the layers of a forward share what
    MLX's products take of them.

    Attributes:
        slots: ``[T]``, or ``[..., k]`` of pairs of a row and an expert.
    """

    def __init__(self, slots: mx.array) -> None:
        self.slots = slots

    @classmethod
    def known(cls, slots: npt.NDArray[np.int32]) -> Self:
        """Of numbers ``[T]`` that the host knows, so that a GPU computes nothing of them."""
        found = cls(mx.array(slots))
        if mx.default_device() != mx.cpu:
            found.factors = mx.array(np.maximum(slots, 0).astype(np.uint32))
            found.inputs = mx.array(np.arange(len(slots), dtype=np.uint32))
            found.have_terms = mx.array(slots >= 0)
        return found

    @cached_property
    def factors(self) -> mx.array:
        """The factors that each row takes: any if it has no term."""
        return mx.maximum(self.slots, 0).astype(mx.uint32)

    @cached_property
    def inputs(self) -> mx.array | None:
        """The number of each row; None: as MLX numbers them."""
        return mx.arange(len(self.slots), dtype=mx.uint32) if self.slots.ndim == 1 else None

    @cached_property
    def have_terms(self) -> mx.array:
        """Whether each row has a term."""
        return self.slots >= 0


def times_weight(layer: Any, x: mx.array) -> mx.array:
    """The product of `x` and the weight of one of MLX's linear layers, without its bias."""
    if not hasattr(layer, "bits"):
        product: mx.array = x @ layer["weight"].T
        return product
    sizes = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    factors = layer["weight"], layer["scales"], layer.get("biases")
    return mx.quantized_matmul(x, *factors, transpose=True, **sizes)


def add_low_rank_terms(
    y: mx.array, x: mx.array, a: mx.array, b: mx.array, rows: RowSlots
) -> mx.array:
    """``y + (x @ a[s].T) @ b[s]`` in the rows whose slot s is not negative; the other rows as they
    are, bit for bit (LoRA; Hu et al. 2021, arXiv:2106.09685, section 4.1).

    Args:
        y: ``[..., O]``, T rows.
        x: ``[..., I]``, as many rows.
        a: ``[S, r, I]``.
        b: ``[S, r, O]``, of a's dtype.
        rows: ``[T]`` slots below S.
    """
    assert y.size == len(rows.slots) * y.shape[-1], "a layer computes other rows than the step has"
    return _added(y, x, a, b, rows)


def expert_slots(slots: mx.array, experts: mx.array, num_experts: int) -> RowSlots:
    """The slots of pairs of a row and an expert, for :func:`add_expert_terms`.

    Args:
        slots: of the rows, int32, of the shape of `experts`; -1: a row has no term.
        experts: ``[..., k]`` below `num_experts`.
    """
    return RowSlots(mx.where(slots >= 0, slots * num_experts + experts.astype(mx.int32), -1))


def add_expert_terms(
    y: mx.array, x: mx.array, a: mx.array, b: mx.array, pairs: RowSlots
) -> mx.array:
    """``y + (x @ a[s, e].T) @ b[s, e]`` in the rows of a layer of experts whose slot s is not
    negative; the other rows as they are.

    Args:
        a: ``[S, E, r, I]``.
        b: ``[S, E, r, O]``.
        pairs: of each row of `y` as :func:`expert_slots`.
    """
    return _added(y, x, a.flatten(0, 1), b.flatten(0, 1), pairs)


def _added(y: mx.array, x: mx.array, a: mx.array, b: mx.array, rows: RowSlots) -> mx.array:
    """``y + (x @ a[i].T) @ b[i]`` in the rows whose slot i is not -1; the others as they are."""
    index = rows.slots
    if mx.default_device() != mx.cpu:
        inputs = x if index.ndim > 1 else x.reshape(-1, 1, x.shape[-1])
        chosen = rows.inputs, rows.factors
        first = mx.gather_mm(inputs, a.swapaxes(-1, -2), *chosen)
        terms = mx.gather_mm(first, b, *chosen).reshape(y.shape)
        have_terms = rows.have_terms.reshape(*y.shape[:-1], 1)
        return mx.where(have_terms, y + terms.astype(y.dtype), y)
    if not y.dtype == x.dtype == a.dtype:  # a layer of float32 beside weights of 16 bits
        y32, *others = (each.astype(mx.float32) for each in (y, x, a, b))
        return _ext.layers.low_rank_terms(y32, *others, index).astype(y.dtype)
    return _ext.layers.low_rank_terms(y, x, a, b, index)
