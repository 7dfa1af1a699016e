"""Arrays of floating point in 8 bits an element, with a scale for each row."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import mlx.core as mx

MOST_STEPS = 125
"""The largest element of a row is so many steps of its scale. The other codes stand for elements
that are no finite numbers."""

INFINITY, NOT_A_NUMBER = 126, 127
"""Codes; that of minus infinity is ``-INFINITY``."""

LEAST_SCALE = 2.0**-126
"""The scale of a row of zeros, or of fainter elements: the smallest normal number of float32. Where
a device has no others, it would take a smaller scale for 0."""

LEAST_ROW = 16
"""Elements of a row at least, if an array has as many: a scale is then at most a fifth of the
bytes."""

SCALE_BYTES = mx.float32.size

DTYPES = {str(dtype): dtype for dtype in (mx.float32, mx.float16, mx.bfloat16)}
"""The dtypes that are stored so, by name. Arrays of others are kept as they are."""


@dataclass(frozen=True, slots=True)
class Rows8:
    """An array ``[1, ...]`` of which each row has a scale. A row is the last axis, and as many axes
    before it as have :data:`LEAST_ROW` elements together.

    Attributes:
        codes: int8, with the shape of the array.
        scales: float32, ``[rows, 1]``.
        dtype: of the array.
    """

    codes: mx.array
    scales: mx.array
    dtype: mx.Dtype

    @classmethod
    def of(cls, array: mx.array) -> "Rows8":
        """Round each element to the nearest step of its row's scale. Infinities and NaN stay what
        they are, and change no other element of their row.

        Args:
            array: ``[1, ...]`` of one of :data:`DTYPES`, not empty.
        """
        rows = array.astype(mx.float32).reshape(-1, row_length(array.shape))
        finite = mx.isfinite(rows)
        known = mx.where(finite, rows, 0.0)
        largest = mx.max(mx.abs(known), axis=1, keepdims=True)
        scales = mx.maximum(largest / MOST_STEPS, LEAST_SCALE)
        steps = mx.clip(mx.round(known / scales), -MOST_STEPS, MOST_STEPS)
        others = mx.where(rows > 0, INFINITY, -INFINITY)
        others = mx.where(mx.isnan(rows), NOT_A_NUMBER, others)
        codes = mx.where(finite, steps, others).astype(mx.int8)
        return cls(codes.reshape(array.shape), scales, array.dtype)

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """Codes and scales: with `dtype` these make the same again."""
        return self.codes, self.scales

    @property
    def array(self) -> mx.array:
        """The array, rounded: each element differs by half a step at most, and by the rounding of
        its dtype."""
        codes = self.codes.reshape(len(self.scales), -1)
        rows = codes.astype(mx.float32) * self.scales
        rows = mx.where(codes == INFINITY, mx.inf, rows)
        rows = mx.where(codes == -INFINITY, -mx.inf, rows)
        rows = mx.where(codes == NOT_A_NUMBER, mx.nan, rows)
        return rows.reshape(self.codes.shape).astype(self.dtype)


def row_length(shape: Sequence[int]) -> int:
    """The elements that share a scale, of an array of this shape, not empty."""
    length = 1
    for axis in reversed(shape[1:]):
        if length >= LEAST_ROW:
            break
        length *= axis
    return length


def can_be_stored(array: mx.array) -> bool:
    """Whether an array is stored in 8 bits: others are kept as they are."""
    return array.size > 0 and str(array.dtype) in DTYPES


def num_stored_bytes(array: mx.array) -> int:
    """Bytes of an array ``[1, ...]`` that is stored so, or kept as it is."""
    if not can_be_stored(array):
        return array.nbytes
    return array.size + SCALE_BYTES * (prod(array.shape) // row_length(array.shape))
