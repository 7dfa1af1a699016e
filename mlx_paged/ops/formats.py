"""How a pool stores keys and values: as they are, or quantized with scales.

``kv_bits`` None: in the model's type. 8: as int8, with a float16 scale for each token and KV head.
"8,4": keys so, and values in 4 bits, with a scale and a minimum for each group of :data:`GROUP`
columns, of which the last may be narrower. ``csrc/kv_formats.h`` has the layout of the bytes,
``csrc/cpu/quantize.h`` the rounding; :func:`quantized` computes the same.
"""

from typing import NamedTuple

import mlx.core as mx

from mlx_paged.arguments import shown

GROUP = 64
KVBits = int | str | None


class Format(NamedTuple):
    """How keys or values are stored."""

    bits: int  # of an element
    # Of the stored elements; 4-bit ones lie in pairs, the first in the low half of a byte.
    dtype: mx.Dtype

    @property
    def has_scales(self) -> bool:
        return not mx.issubdtype(self.dtype, mx.floating)

    def columns(self, dims: int) -> int:
        """Stored elements of a row."""
        return dims * self.bits // (8 * self.dtype.size)

    def scale_columns(self, dims: int) -> int:
        """Numbers among a row's scales."""
        if not self.has_scales:
            return 0
        return 1 if self.bits == 8 else 2 * -(-dims // GROUP)

    def row_bytes(self, dims: int) -> int:
        """Bytes of a row and its scales."""
        scales = self.scale_columns(dims) * mx.float16.size
        return self.columns(dims) * self.dtype.size + scales


_BITS_8, _BITS_4 = Format(8, mx.int8), Format(4, mx.uint8)
FORMATS = {8: (_BITS_8, _BITS_8), "8,4": (_BITS_8, _BITS_4)}
"""By kv_bits: the formats of keys and of values."""


def formats(kv_bits: KVBits, dtype: mx.Dtype) -> tuple[Format, Format]:
    """The formats of keys and values of a model's `dtype`."""
    plain = Format(8 * dtype.size, dtype)
    return (plain, plain) if kv_bits is None else FORMATS[kv_bits]


def checked_bits(where: str, kv_bits: KVBits) -> KVBits:
    """`kv_bits` as a key of :data:`FORMATS`, or None. Raises ValueError if there is no such
    format."""
    given = kv_bits.replace(" ", "") if isinstance(kv_bits, str) else kv_bits
    if given is None or (type(given) in (int, str) and given in ("8", "8,8", *FORMATS)):
        return 8 if given in ("8", "8,8") else given
    raise ValueError(
        f'[{where}] kv_bits is {shown(kv_bits)}: expected 8, or "8,4" for values of 4 bits. Keys of'
        " fewer than 8 bits for each token change the output too much: docs/kv-quantization.md"
    )


def format_of(cache: mx.array) -> Format:
    return _BITS_4 if cache.dtype == mx.uint8 else _BITS_8


def dims_of(cache: mx.array) -> int:
    """The head dimension of keys or values, quantized or not."""
    return cache.shape[-1] * (2 if cache.dtype == mx.uint8 else 1)


def quantized(x: mx.array, form: Format) -> tuple[mx.array, mx.array]:
    """Rows ``[..., D]`` of a floating type as stored elements and their scales."""
    x = x.astype(mx.float32)
    if form.bits == 8:
        scales = (mx.abs(x).max(axis=-1, keepdims=True) / 127).astype(mx.float16)
        return _nearest(x, scales, -127, 127).astype(mx.int8), scales
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


def _nearest(x: mx.array, scales: mx.array, least: int, most: int) -> mx.array:
    """Multiples of the scales nearest to `x`, ties to even; a scale of 0 gives 0."""
    scales = scales.astype(mx.float32)
    return mx.where(scales == 0, 0, mx.clip(mx.round(x / scales), least, most))


def dequantized(cache: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
    """Stored elements ``[..., columns]`` and their scales as rows ``[..., D]``: computed in
    float32, then rounded to `dtype`."""
    scales = scales.astype(mx.float32)
    if format_of(cache).bits == 8:
        return (cache.astype(mx.float32) * scales).astype(dtype)
    nibbles = mx.stack([cache & 15, cache >> 4], axis=-1).flatten(-2).astype(mx.float32)
    dims = nibbles.shape[-1]
    group = mx.arange(dims) // GROUP
    return (nibbles * scales[..., ::2][..., group] + scales[..., 1::2][..., group]).astype(dtype)
