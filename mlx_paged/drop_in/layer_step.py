"""Attention of one layer in one padded forward."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_paged.attention.dispatch import FEW_QUERIES
from mlx_paged.attention.path_table import AttentionPath
from mlx_paged.attention.pool_attention import PoolAttention
from mlx_paged.attention.sdpa_hook import CausalMask, KVHandle
from mlx_paged.drop_in.padded_batch import RowStep
from mlx_paged.drop_in.row_spans import RowSpans
from mlx_paged.kv.pool import KVPool


@dataclass(frozen=True, eq=False)
class LayerStep:
    """What the handles of one layer's K/V refer to.

    Attributes:
        kv: the layer's arrays, a pool of one layer.
        step: whose K/V is written by now.
        window: tokens that a query of this layer sees at most, itself included.
    """

    kv: KVPool
    step: RowStep
    window: int | None

    def handles(self) -> tuple[KVHandle, KVHandle]:
        """Handles to all K/V of the step's sequences, ``[B, H_kv, S, D]``."""
        return (
            KVHandle.of(self.step.gathered(self.kv.k[0]), self, "keys"),
            KVHandle.of(self.step.gathered(self.kv.v[0]), self, "values"),
        )

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> CausalMask:
        """``[B, 1, N, S]`` bool for each row's last N tokens."""
        window, spans = narrowest(window_size, self.window), self.step.spans
        if spans.columns != N:
            spans = RowSpans.of(spans.stops - np.int32(N), N)
        return CausalMask.of(spans.mask(window), window)

    def attend(
        self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array | None:
        """Attention of ``q [B, H, N, D]`` over the pool; what padding columns get is undefined."""
        if q.shape[2] != self.step.spans.columns:
            return None
        attention = PoolAttention(self.kv, 0, scale, narrowest(window, self.window), sinks)
        step = self.step
        if q.shape[2] <= FEW_QUERIES:
            return attention.rows(q, step.tables, step.context_lens)
        if attention.path(q, step.spans.max_context) is AttentionPath.PAGED:
            return attention.through_tables(q, step.tables, step.context_lens)
        return self._row_by_row(q, attention)

    def _row_by_row(self, q: mx.array, attention: PoolAttention) -> mx.array:
        """MLX's own attention, each row over its own context alone."""
        rows = []
        for i, chunk in enumerate(self.step.chunks):
            if chunk is None:
                rows.append(mx.zeros((1, *q.shape[1:3], self.kv.shapes[0].v_head_dim), q.dtype))
                continue
            first, stop = chunk.first_row, chunk.first_row + chunk.length
            out = attention.gathered_chunk(q[i : i + 1, :, first:stop], chunk)
            padding = [(0, 0), (0, 0), (first, q.shape[2] - stop), (0, 0)]
            rows.append(out if chunk.length == q.shape[2] else mx.pad(out, padding))
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)


def narrowest(*windows: int | None) -> int | None:
    """The smallest of the windows that there are."""
    return min((window for window in windows if window is not None), default=None)
