"""The arrays of one layer of a pool as one value."""

from typing import Any, NamedTuple

import mlx.core as mx


class LayerKV(NamedTuple):
    """Keys and values of one layer, and the scales of both if they are quantized. What an array
    holds follows from its type: see :mod:`mlx_paged.ops.formats`."""

    keys: mx.array
    values: mx.array
    k_scales: mx.array | None = None
    v_scales: mx.array | None = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All arrays that the layer has."""
        return tuple(array for array in self if array is not None)

    @property
    def is_quantized(self) -> bool:
        return self.k_scales is not None

    @property
    def options(self) -> dict[str, Any]:
        """The further arguments that the ops take for this layer: scales, if it has any."""
        if not self.is_quantized:
            return {}
        return {"k_scales": self.k_scales, "v_scales": self.v_scales}
