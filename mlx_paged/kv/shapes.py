"""What the layers of a model store for a token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_paged.ops.formats import Format, formats
from mlx_paged.options import KVBits, checked_bits

DEQUANTIZED = {8: 1 + 4, 6: 0.75 + 3 + 1 + 4, 4: 0.5 + 1 + 1 + 3 * 4}
"""By its bits, the bytes of what plain MLX makes of a stored element before it has the model's
type: the bytes that it gathers, integers, and float32. See ``csrc/dequantize.cpp``."""

QUANTIZED = 10 * 4
"""Bytes of the same from an element of a row until it is stored."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer stores for a token: `n_kv_heads` keys and values."""

    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    # Values are the first `v_head_dim` columns of the keys and are stored once. The two arrays
    # written are the latent and the rotary key, which fills the other columns.
    latent: bool = False
    kv_bits: int | None = None  # how the pool stores them; see :mod:`mlx_paged.ops.formats`
    # Whether they are stored as their Hadamard transforms, which have no outliers. Queries are
    # transformed, too, and outputs back.
    rotates: bool = False

    def quantized(self, where: str, kv_bits: KVBits, rotates: bool = True) -> "KVShape":
        """This layer's shape in a pool with these `kv_bits`.

        Raises:
            ValueError: such a pool cannot hold this layer, or the device cannot use it.
        """
        kv_bits = checked_bits(where, kv_bits)
        problem = None
        if kv_bits is None:
            pass
        elif self.latent:
            problem = "a layer stores latents (MLA), and keys and values in one row need two scales"
        elif kv_bits != 8 and (dims := [d for d in self.row_dims if d % 8]):
            problem = f"keys or values have {dims[0]} dimensions, no multiple of 8"
        if problem:
            raise ValueError(f"[{where}] kv_bits is {kv_bits!r}, but {problem}: expected None")
        return replace(self, kv_bits=kv_bits, rotates=rotates and kv_bits is not None)

    @property
    def formats(self) -> tuple[Format, Format]:
        """Of keys and of values."""
        return formats(self.kv_bits, self.dtype)

    @property
    def row_dims(self) -> tuple[int, int]:
        """Columns of the two rows that are written for a token and head."""
        if self.latent:
            return self.v_head_dim, self.head_dim - self.v_head_dim
        return self.head_dim, self.v_head_dim

    @property
    def token_bytes(self) -> int:
        rows = zip(self.formats, self.row_dims, strict=True)
        return self.n_kv_heads * sum(form.row_bytes(dims) for form, dims in rows)

    @property
    def scale_bytes(self) -> int:
        """The part of `token_bytes` that is scales."""
        rows = zip(self.formats, self.row_dims, strict=True)
        count = sum(form.scale_columns(dims) for form, dims in rows)
        return self.n_kv_heads * count * mx.float16.size

    @property
    def elements(self) -> int:
        """Numbers of a token: those of its keys and values, or of its latents."""
        return self.n_kv_heads * sum(self.row_dims)

    @property
    def gathered_bytes(self) -> float:
        """Bytes of the arrays that plain MLX makes of a token to attend to it: gathered, and
        dequantized. Ops that follow one another take the memory of their inputs."""
        total = 0.0
        for form, dims in zip(self.formats, self.row_dims, strict=True):
            total += dims * (DEQUANTIZED[form.bits] if form.has_scales else 0)
            total += dims * self.dtype.size + form.scale_columns(dims) * (2 + 4)
        if self.latent:  # their values are a part of the keys, which a mask copies
            total += self.v_head_dim * self.dtype.size
        return self.n_kv_heads * total

    @property
    def widest(self) -> int:
        """Bytes of the widest number that plain MLX makes of an element: float32, if quantized."""
        return self.dtype.size if self.kv_bits is None else 4

    @property
    def plainly_written(self) -> int:
        """Bytes that plain MLX makes of an element before it has the type of the pool."""
        return 0 if self.kv_bits is None else QUANTIZED

    @property
    def array_bytes(self) -> int:
        """Bytes of a token in the largest one of the layer's arrays."""
        rows = zip(self.formats, (self.head_dim, self.v_head_dim), strict=True)
        return self.n_kv_heads * max(form.columns(dims) * form.dtype.size for form, dims in rows)


def block_bytes(shapes: Sequence[KVShape], block_size: int) -> int:
    """Bytes of one block of all these layers, keys and values together."""
    return block_size * sum(shape.token_bytes for shape in shapes)
