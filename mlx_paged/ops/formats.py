"""How a pool stores keys and values: as they are, or quantized with scales.

``kv_bits`` None: in the model's type. 8 or 6: integers of so many bits, with a float16 scale for
each token and KV head. 4: keys in 6 bits, and values in 4 bits, with a scale and a minimum for each
group of :data:`GROUP` columns, of which the last may be narrower. ``csrc/kv_formats.h`` has the
layout of the bytes, ``csrc/cpu/quantize.h`` the rounding; :func:`quantized` computes the same.
"""

from typing import NamedTuple

import mlx.core as mx

from mlx_paged import _ext

GROUP = 64

dequantized = _ext.dequantized


class Format(NamedTuple):
    """How keys or values are stored."""

    bits: int  # of an element
    dtype: mx.Dtype  # of what is stored; elements of 6 and of 4 bits share it

    @property
    def has_scales(self) -> bool:
        return not mx.issubdtype(self.dtype, mx.floating)

    def columns(self, dims: int) -> int:
        """Numbers of this type in a row."""
        return dims * self.bits // (8 * self.dtype.size)

    def scale_columns(self, dims: int) -> int:
        """Numbers among a row's scales."""
        if not self.has_scales:
            return 0
        return 2 * -(-dims // GROUP) if self.bits == 4 else 1

    def row_bytes(self, dims: int) -> int:
        """Bytes of a row and its scales."""
        scales = self.scale_columns(dims) * mx.float16.size
        return self.columns(dims) * self.dtype.size + scales


_BITS_8, _BITS_6, _BITS_4 = Format(8, mx.int8), Format(6, mx.uint16), Format(4, mx.uint8)
FORMATS = {8: (_BITS_8, _BITS_8), 6: (_BITS_6, _BITS_6), 4: (_BITS_6, _BITS_4)}
"""By kv_bits: the formats of keys and of values."""

_BY_DTYPE = {form.dtype: form for form in (_BITS_8, _BITS_6, _BITS_4)}


def formats(kv_bits: int | None, dtype: mx.Dtype) -> tuple[Format, Format]:
    """The formats of keys and values of a model's `dtype`."""
    plain = Format(8 * dtype.size, dtype)
    return (plain, plain) if kv_bits is None else FORMATS[kv_bits]


def format_of(cache: mx.array) -> Format:
    return _BY_DTYPE.get(cache.dtype) or Format(8 * cache.dtype.size, cache.dtype)


def dims_of(cache: mx.array) -> int:
    """The head dimension of keys or values, quantized or not."""
    return 8 * cache.dtype.size * cache.shape[-1] // format_of(cache).bits


def quantized(x: mx.array, form: Format) -> tuple[mx.array, mx.array]:
    """Rows ``[..., D]`` of a floating type as stored elements and their scales."""
    x = x.astype(mx.float32)
    if form.bits != 4:
        most = 2 ** (form.bits - 1) - 1
        scales = (mx.abs(x).max(axis=-1, keepdims=True) / most).astype(mx.float16)
        q = _nearest(x, scales, -most, most).astype(mx.int8)
        return (q if form.bits == 8 else _packed(q)), scales
    elements, numbers = [], []
    for first in range(0, x.shape[-1], GROUP):
        group = x[..., first : first + GROUP]
        low = group.min(axis=-1, keepdims=True).astype(mx.float16)
        rise = group.max(axis=-1, keepdims=True) - low.astype(mx.float32)
        scales = (rise / 15).astype(mx.float16)
        elements.append(_nearest(group - low.astype(mx.float32), scales, 0, 15))
        numbers += [scales, low]
    nibbles = mx.concatenate(elements, axis=-1).astype(mx.uint8)
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4), mx.concatenate(numbers, axis=-1)


def _packed(q: mx.array) -> mx.array:
    """Elements of 6 bits, each four in three bytes."""
    fours = mx.unflatten(q.astype(mx.uint32) & 63, -1, (-1, 4))
    bits = (fours << mx.arange(0, 24, 6, mx.uint32)).sum(axis=-1)
    threes = mx.unflatten(bits.view(mx.uint8), -1, (-1, 4))[..., :3]
    return threes.flatten(-2).view(mx.uint16)


def _nearest(x: mx.array, scales: mx.array, least: int, most: int) -> mx.array:
    """Multiples of the scales nearest to `x`, ties to even; a scale of 0 gives 0."""
    scales = scales.astype(mx.float32)
    return mx.where(scales == 0, 0, mx.clip(mx.round(x / scales), least, most))
