"""What a model of latent attention (MLA) holds in place of its rotary keys."""

from typing import Any

import mlx.core as mx

from mlx_paged.attention.sdpa_hook import KVHandle, LatentCache, RotaryScores
from mlx_paged.ops import view_as


class RotaryHandle(KVHandle):
    """Rotary keys ``[B, 1, S, rope]``, which a layer caches in the place of values.

    Their product with queries is ``queries @ handle.swapaxes(-1, -2)``.
    """

    cache: LatentCache

    def swapaxes(self, axis1: int, axis2: int, **kwargs: Any) -> mx.array:
        swapped = mx.swapaxes(self, axis1, axis2, **kwargs)
        if {axis1 % self.ndim, axis2 % self.ndim} != {self.ndim - 1, self.ndim - 2}:
            return swapped
        columns = view_as(_RotaryColumns, swapped)
        columns.cache = self.cache
        return columns


class _RotaryColumns(mx.array):
    """Rotary keys ``[B, 1, rope, S]``."""

    cache: LatentCache

    def __rmatmul__(self, queries: mx.array) -> RotaryScores:
        """Python asks a subclass on the right before the array on the left."""
        return RotaryScores.of(mx.matmul(queries, self), self.cache, queries)
