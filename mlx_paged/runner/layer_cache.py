"""One layer of the pool as an mlx-lm cache."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from mlx_paged import ops
from mlx_paged.attention.chunks import narrowest
from mlx_paged.attention.pool_attention import PoolAttention
from mlx_paged.attention.sdpa_hook import CausalMask, KVHandle, RotaryHandle
from mlx_paged.kv.pool import KVPool
from mlx_paged.runner.batch import Batch, Layout, SampledRows


class BatchAttention(PoolAttention):
    """One layer's attention of a batch."""

    __slots__ = ()

    def attend(self, q: mx.array, batch: Batch | SampledRows) -> mx.array:
        """Attention of ``q [T, H, 1, D]`` (rows) or ``[1, H, L, D]`` (a chunk); returns that shape
        with the values' head_dim."""
        if batch.layout is Layout.CHUNK:
            return self.chunk(q, batch.chunks[0])
        parts = []
        if batch.num_decodes:
            decodes = q[: batch.num_decodes]
            parts.append(self.rows(decodes, batch.block_tables, batch.context_lens))
        for chunk in batch.chunks:
            rows = q[chunk.first_row : chunk.first_row + chunk.length].transpose(2, 1, 0, 3)
            parts.append(self.chunk(rows, chunk).transpose(2, 1, 0, 3))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)


def storable(values: mx.array) -> mx.array:
    """Values that the pool can hold: layers that cache keys alone pass ``[B, H_kv, L, 0]``."""
    if values.shape[-1]:
        return values
    return mx.zeros((*values.shape[:-1], 1), values.dtype)


class UntrimmedCache(_BaseCache):
    """A cache that keeps what is in front of the chunk that llama4 attends to.

    The model hides it by a mask of its own, counted from `start_position`.
    """

    start_position = 0

    def maybe_trim_front(self) -> None:
        """Keep everything."""


class PagedLayerCache(UntrimmedCache):
    """What a model sees as the K/V cache of one layer: the sequences of the bound batch.

    It keeps to the cache protocol of mlx-lm 0.32: ``offset``, ``update_and_fetch``, ``make_mask``,
    ``keys``, ``values``, ``keys_and_values``, ``state``. Bind a batch before every forward.

    Args:
        pool: where K/V lives.
        layer: index of this layer in the pool.
        window: tokens that a query sees at most (sliding-window layers), itself included.
    """

    def __init__(self, pool: KVPool, layer: int, window: int | None = None) -> None:
        self.pool = pool
        self.layer = layer
        self.window = window
        self._batch: Batch | SampledRows | None = None
        self._written = False
        self._attends = True
        self._written_before = False  # the call that only stored

    def bind(self, batch: Batch) -> None:
        """The next forward computes this batch."""
        self._batch = batch
        self._written = False
        self._attends = True

    def store_only(self) -> None:
        """The next call of a layer is made for the K/V that it stores."""
        self._attends = False
        self._written_before = self._written

    def attend_only(self, rows: SampledRows) -> None:
        """The next call computes `rows`, whose K/V is stored."""
        self._batch = rows
        self._attends = True
        self._written = self._written_before

    @property
    def batch(self) -> Batch | SampledRows:
        assert self._batch is not None, "a paged cache is used before a batch is bound to it"
        return self._batch

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: ``[T]`` int32 for rows, an int for a chunk."""
        batch = self.batch
        if isinstance(batch, Batch) and batch.layout is Layout.CHUNK:
            return batch.start + (batch.num_tokens if self._written else 0)
        return batch.positions + 1 if self._written else batch.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """Write the step's K/V, ``[T, H_kv, 1, D]`` or ``[1, H_kv, L, D]``; return lazy handles."""
        batch = self.batch
        if isinstance(batch, Batch):
            slots = batch.slot_mapping
            self.pool.write(self.layer, self._rows(keys), self._rows(storable(values)), slots)
        self._written = True
        return self.keys_and_values()

    def _rows(self, x: mx.array) -> mx.array:
        """As ``[T, H_kv, D]``, a view: the rows layout has that order already."""
        return x[:, :, 0] if self.batch.layout is Layout.ROWS else x[0].transpose(1, 0, 2)

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        """Handles to all K/V of the bound batch's sequences, ``[T or 1, H_kv, S, D]``."""
        keys, values = map(self._gathered, self.pool.write_targets(self.layer))
        return KVHandle.of(keys, self, "keys"), KVHandle.of(values, self, "values")

    def _gathered(self, cache: mx.array) -> mx.array:
        batch = self.batch
        return ops.gather_blocks(cache, batch.row_tables, batch.max_context)

    def contiguous(self, block_ids: mx.array, num_tokens: int) -> tuple[mx.array, mx.array]:
        """What the model stored of one sequence, copied out: ``[1, H_kv, num_tokens, D]`` each."""
        return self.pool.gather(self.layer, block_ids, num_tokens)

    def attend(
        self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array | None:
        """Attention over the pool, without the gather."""
        if not self._attends:
            shape = (*q.shape[:3], self.pool.shapes[self.layer].v_head_dim)
            return mx.broadcast_to(mx.zeros((), q.dtype), shape)  # nobody looks at it
        window = narrowest(window, self.window)
        attention = BatchAttention(self.pool, self.layer, scale, window, sinks)
        return attention.attend(q, self.batch)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> CausalMask:
        """The batch's mask; its window is the smaller of the layer's and the one asked for."""
        window = narrowest(window_size, self.window)
        return CausalMask.of(self.batch.mask(window), window)

    @property
    def keys(self) -> mx.array:
        """The pool's keys. Pipeline-parallel models replace the handle by a dependent one."""
        return self.pool.k[self.layer]

    @keys.setter
    def keys(self, handle: mx.array) -> None:
        self.pool.set_keys(self.layer, handle)

    @property
    def values(self) -> mx.array:
        """The pool's values. Setting them changes nothing: deepseek_v32 does, to clear values that
        it never reads, and would replace the whole pool by zeros."""
        return self.pool.v[self.layer]

    @values.setter
    def values(self, handle: mx.array) -> None:
        pass

    @property
    def state(self) -> Any:
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        token_bytes = self.pool.shapes[self.layer].token_bytes
        return self.pool.num_blocks * self.pool.block_size * token_bytes

    def size(self) -> int:
        return self.batch.max_context

    def empty(self) -> bool:
        return self.batch.max_context == 0


class LatentLayerCache(PagedLayerCache):
    """The cache of a layer of latent attention (MLA): latents take the place of keys, rotary keys
    ``[T, 1, 1, rope]`` or ``[1, 1, L, rope]`` that of values."""

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        latents, rotary_keys = map(self._gathered, self.pool.write_targets(self.layer))
        return KVHandle.of(latents, self, "keys"), RotaryHandle.of(rotary_keys, self, "values")

    def contiguous(self, block_ids: mx.array, num_tokens: int) -> tuple[mx.array, mx.array]:
        rows, latents = super().contiguous(block_ids, num_tokens)
        return latents, rows[..., latents.shape[-1] :]

    def attend(
        self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array | None:
        """Rotary keys are no values."""
        return None

    def attend_latents(
        self,
        q: mx.array,
        rotary_q: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attention of ``q [T, H, 1, rank]`` over the pool, without the gather."""
        joint = mx.concatenate([q, (rotary_q / scale).astype(q.dtype)], axis=-1)
        return super().attend(joint, scale, window, sinks)


def layer_cache(pool: KVPool, layer: int, window: int | None) -> PagedLayerCache:
    """The cache of a layer, of the kind that fits its shape."""
    kind = LatentLayerCache if pool.shapes[layer].latent else PagedLayerCache
    return kind(pool, layer, window)
