"""Attention of one layer in one padded forward."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.batch import Chunk
from mlx_paged.batch_attention import calls
from mlx_paged.kv_pool import KVPool
from mlx_paged.row_spans import RowSpans
from mlx_paged.row_step import RowStep
from mlx_paged.sdpa_hook import CausalMask, KVHandle, mlx_attention

FEW_QUERIES = 8
"""Up to so many columns, as of a speculative step, attend through block tables."""


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
        window = narrowest(window, self.window)
        if q.shape[2] <= FEW_QUERIES:
            return self._through_tables(q, scale, window, sinks)
        return self._row_by_row(q, scale, window, sinks)

    def _through_tables(
        self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        calls["paged"] += 1
        return ops.paged_attention(
            q,
            self.kv.k,
            self.kv.v,
            self.step.tables,
            self.step.context_lens,
            scale=scale,
            window=window,
            sinks=sinks,
            check_tables=False,
        )

    def _row_by_row(
        self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """MLX's own attention, each row over its own context alone."""
        rows = []
        for i, chunk in enumerate(self.step.chunks):
            if chunk is None:
                rows.append(mx.zeros((1, *q.shape[1:3], self.kv.shapes[0].v_head_dim), q.dtype))
                continue
            first, stop = chunk.first_row, chunk.first_row + chunk.length
            out = self._chunk(q[i : i + 1, :, first:stop], chunk, scale, window, sinks)
            padding = [(0, 0), (0, 0), (first, q.shape[2] - stop), (0, 0)]
            rows.append(out if chunk.length == q.shape[2] else mx.pad(out, padding))
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)

    def _chunk(
        self, q: mx.array, chunk: Chunk, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        calls["chunk"] += 1
        first, block_size = 0, self.kv.block_size
        mask: mx.array | str = "causal"
        if window is not None and chunk.context_len > window:
            first = chunk.first_seen(window, block_size)
            mask = chunk.window_mask(window, first)
        blocks = chunk.block_ids[first // block_size :]
        k, v = self.kv.gather(0, blocks, chunk.context_len - first)
        return mlx_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def narrowest(*windows: int | None) -> int | None:
    """The smallest of the windows that there are."""
    return min((window for window in windows if window is not None), default=None)
