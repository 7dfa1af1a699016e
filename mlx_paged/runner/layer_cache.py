"""One layer of the pool as an mlx-lm cache."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from mlx_paged import ops
from mlx_paged.attention.pool_attention import PoolAttention, max_paged_queries, narrowest
from mlx_paged.attention.sdpa_hook import CausalMask, KVHandle, RotaryHandle
from mlx_paged.kv.pool import KVPool
from mlx_paged.runner.batch import Batch, Layout, SampledRows


def storable(values: mx.array) -> mx.array:
    """Values that the pool can hold: layers that cache only keys pass ``[B, H_kv, L, 0]``."""
    if values.shape[-1]:
        return values
    return mx.zeros((*values.shape[:-1], 1), values.dtype)


class UntrimmedCache(_BaseCache):
    """A cache that keeps the tokens before the chunk that llama4 attends to.

    The model hides these tokens by its own mask, whose columns begin at `start_position`.
    """

    start_position = 0

    def maybe_trim_front(self) -> None:
        """Keep all tokens."""


class PagedLayerCache(UntrimmedCache):
    """The K/V cache of one layer, as the model sees it: the sequences of the bound batch.

    It follows the cache protocol of mlx-lm 0.32: ``offset``, ``update_and_fetch``, ``make_mask``,
    ``keys``, ``values``, ``keys_and_values``, ``state``. Bind a batch before every forward.

    Args:
        pool: holds the K/V.
        layer: index of this layer in the pool.
        window: tokens that a query sees at most (sliding-window layers), itself included.

    Attributes:
        batch: the bound batch, or the sampled rows of it that the last layer computes.
        offset: position of the next token: ``[T]`` int32 for rows, an int for a chunk.
    """

    batch: Batch | SampledRows
    offset: int | mx.array

    def __init__(self, pool: KVPool, layer: int, window: int | None = None) -> None:
        self.pool = pool
        self.layer = layer
        self.window = window
        self._max_paged_queries = max_paged_queries()
        self._attends = True
        self._is_written = False
        self._was_written = False  # before the call that only stored

    def bind(self, batch: Batch) -> None:
        """The next forward computes this batch."""
        self.batch = batch
        self.offset = batch.offset
        self._is_written = False
        self._attends = True

    def store_only(self) -> None:
        """The next call of the layer only stores K/V; its output is not used."""
        self._attends = False
        self._was_written = self._is_written

    def attend_only(self, rows: SampledRows) -> None:
        """The next call computes `rows`. Their K/V is stored already."""
        self.batch = rows
        self._attends = True
        self._is_written = self._was_written
        self.offset = rows.next_offset if self._is_written else rows.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """Write the step's K/V, ``[T, H_kv, 1, D]`` or ``[1, H_kv, L, D]``; return lazy handles."""
        batch = self.batch
        if isinstance(batch, Batch):
            values = storable(values)
            if batch.layout is Layout.ROWS:
                rows = keys[:, :, 0], values[:, :, 0]
            else:
                rows = keys[0].transpose(1, 0, 2), values[0].transpose(1, 0, 2)
            self.pool.write(self.layer, *rows, batch.slot_mapping)
        self._is_written = True
        self.offset = batch.next_offset
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        """Handles to all K/V of the bound batch's sequences, ``[T or 1, H_kv, S, D]``."""
        tables, length = self.batch.row_tables, self.batch.max_context
        keys = ops.gather_blocks(self.pool.k[self.layer], tables, length)
        values = ops.gather_blocks(self.pool.v[self.layer], tables, length)
        return KVHandle.of(keys, self, "keys"), KVHandle.of(values, self, "values")

    def contiguous(self, block_ids: mx.array, num_tokens: int) -> tuple[mx.array, mx.array]:
        """A copy of the K/V that the model stored for one sequence: ``[1, H_kv, num_tokens, D]``
        each."""
        return self.pool.gather(self.layer, block_ids, num_tokens)

    def attend(
        self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array | None:
        """Attention of ``q [T, H, 1, D]`` (rows) or ``[1, H, L, D]`` (a chunk) over the pool;
        returns that shape with the values' head_dim."""
        if not self._attends:
            shape = (*q.shape[:3], self.pool.shapes[self.layer].v_head_dim)
            return mx.broadcast_to(mx.zeros((), q.dtype), shape)
        batch, window = self.batch, narrowest(window, self.window)
        limit = self._max_paged_queries
        attention = PoolAttention(self.pool, self.layer, scale, window, sinks, limit)
        if batch.layout is Layout.CHUNK:
            return attention.chunk(q, batch.chunks[0])
        parts = []
        if batch.num_decodes:
            decodes = q[: batch.num_decodes]
            parts.append(attention.rows(decodes, batch.block_tables, batch.context_lens))
        for chunk in batch.chunks:
            rows = q[chunk.first_row : chunk.first_row + chunk.length].transpose(2, 1, 0, 3)
            parts.append(attention.chunk(rows, chunk).transpose(2, 1, 0, 3))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> CausalMask:
        """The batch's mask; its window is the smaller one of the layer's and `window_size`."""
        window = narrowest(window_size, self.window)
        return CausalMask.of(self.batch.mask(window), window)

    @property
    def keys(self) -> mx.array:
        """The pool's keys. Pipeline-parallel models set a handle that depends on other arrays."""
        return self.pool.k[self.layer]

    @keys.setter
    def keys(self, handle: mx.array) -> None:
        self.pool.set_keys(self.layer, handle)

    @property
    def values(self) -> mx.array:
        """The pool's values. Setting them changes nothing: deepseek_v32 sets zeros to clear values
        that it never reads, and these would replace the whole pool."""
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
    """The cache of a layer of latent attention (MLA). Latents are stored as keys, and rotary keys
    ``[T, 1, 1, rope]`` or ``[1, 1, L, rope]`` as values."""

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        tables, length = self.batch.row_tables, self.batch.max_context
        latents, rotary_keys = (
            ops.gather_blocks(cache, tables, length)
            for cache in self.pool.write_targets(self.layer)
        )
        return KVHandle.of(latents, self, "keys"), RotaryHandle.of(rotary_keys, self, "values")

    def contiguous(self, block_ids: mx.array, num_tokens: int) -> tuple[mx.array, mx.array]:
        rows, latents = super().contiguous(block_ids, num_tokens)
        return latents, rows[..., latents.shape[-1] :]

    def attend(
        self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array | None:
        """None: rotary keys are not values."""
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
    """The cache of a layer, chosen by its shape."""
    kind = LatentLayerCache if pool.shapes[layer].latent else PagedLayerCache
    return kind(pool, layer, window)
