"""The part that the paged caches of one sequence and of a batch share."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import _BaseCache

from mlx_paged.attention.forward import LayerView, causal_mask
from mlx_paged.attention.sdpa_hook import AttendingCache, KVHandle, Query, TaggedArray, narrowest
from mlx_paged.drop_in.padded_batch import PaddedBatch, PaddedSpans
from mlx_paged.drop_in.pool_layer import PoolLayer
from mlx_paged.drop_in.sequence import PagedSequence
from mlx_paged.drop_in.shared_pool import ContentKey
from mlx_paged.kv.block_tables import Int32Array


class StepView(LayerView):
    """One layer's K/V at the end of a step."""

    forward: PaddedBatch

    def __init__(self, layer: PoolLayer, step: PaddedBatch, window: int | None) -> None:
        super().__init__(layer.kv, 0, window, step.max_paged_queries, step)

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        handles = super().keys_and_values()
        self._note_reads(*handles)
        return handles

    def attend(self, query: Query) -> mx.array | None:
        out = super().attend(query)
        if out is not None:
            self._note_reads(out)
        return out

    def _note_reads(self, *arrays: mx.array) -> None:
        """The next step may write to blocks that a window leaves and these arrays read."""
        if self.window is not None:
            self.forward.reads = arrays


Runs = Sequence[mx.array]
RowState = tuple[Runs | None, Runs | None, int, ContentKey]
State = tuple[list[RowState], int | None, int]


class StateView(TaggedArray):
    """K or V in a `state`: a view of blocks, which are not freed while it exists."""

    sequence: PagedSequence
    layer: PoolLayer


class PagedCache(AttendingCache, _BaseCache):
    """One layer's K/V of some sequences, with the cache protocol of mlx-lm 0.32.

    Merging, extending, filtering, extracting, copying and trimming change block tables. K/V is
    copied only when a shared block is written (the tail block of a fork) and when caches of
    different pools join (made in another thread, or for K/V of another type).

    Evaluate a forward's result, or begin its evaluation, before its cache is trimmed or deleted:
    other sequences may then write to the blocks.

    Args:
        layer: the layer that holds the K/V.
        rows: the sequences, none twice.
        starts: ``[B]``, tokens of each sequence in this layer.
        window: tokens that a query sees at most, itself included (sliding-window layers).
    """

    starts: Int32Array
    _remaining: Int32Array | None = None  # tokens before each row's right padding

    def __init__(
        self,
        layer: PoolLayer,
        rows: Sequence[PagedSequence],
        starts: Int32Array | Sequence[int],
        window: int | None = None,
    ) -> None:
        self.layer = layer
        self.window = window
        self._set_rows(rows, starts)

    def _set_rows(self, rows: Sequence[PagedSequence], starts: Int32Array | Sequence[int]) -> None:
        for row in rows:
            row.layers.add(self.layer.index)
        self.rows = tuple(rows)
        self.ids = tuple(row.id for row in rows)
        self.starts = np.array(starts, np.int32)
        self._latest: StepView | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A fork. The layers that are copied with one `memo` share its rows."""
        fork = copy.copy(self)
        fork._set_rows([copy.deepcopy(row, memo) for row in self.rows], self.starts)
        return fork

    # A forward

    def _spans(self, columns: int) -> PaddedSpans:
        """The positions that a forward of so many columns computes."""
        return PaddedSpans.of(self.starts, columns, self._remaining)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write a forward's K/V, ``[B, H_kv, N, D]``; return lazy handles of all K/V.

        The first K/V of a cache may have any shape and type; later K/V is cast to that type.

        Raises:
            ValueError: the number of rows, heads or dimensions is not that of before.
            OutOfBlocksError: the pool is full and may not grow; nothing was written.
        """
        if self._latest is None and self.empty():
            self._begin(keys, values)
        if keys.shape[0] != len(self.rows):
            raise ValueError(
                f"[update_and_fetch] keys have {keys.shape[0]} rows: expected {len(self.rows)}"
            )
        spans = self._spans(keys.shape[2])
        step = self.layer.write(self.rows, self.ids, spans, keys, values)
        self.starts = spans.stops
        if self._remaining is not None:
            self._remaining = self._remaining - np.int32(spans.columns)
        self._latest = StepView(self.layer, step, self.window)
        return self._latest.keys_and_values()

    def _begin(self, keys: mx.array, values: mx.array) -> None:
        """Let the layer for this first K/V hold it."""
        layer = self.layer.layer_for(keys, values)
        if layer is not self.layer:
            self.layer = layer
            self._set_rows([row.fork_for(layer) for row in self.rows], self.starts)

    def rows_in(self, layer: PoolLayer) -> list[PagedSequence]:
        """Forks of the rows into another layer, with their K/V."""
        starts = self.starts.tolist()
        return [layer.fork_from(r, self.layer, n) for r, n in zip(self.rows, starts, strict=True)]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Handles of all K/V, ``[B, H_kv, S, D]``, for a layer that reuses this layer's K/V."""
        if self.empty():
            raise ValueError("[keys_and_values] the cache is empty: expected one with tokens")
        if self._latest is None:
            step = self.layer.pool.step(self.rows, self.ids, PaddedSpans.of(self.starts, 0))
            self._latest = StepView(self.layer, step, self.window)
        return self._latest.keys_and_values()

    def mask(self, columns: int, window: int | None) -> mx.array:
        spans = self._spans(columns)
        positions = mx.array(spans.positions)[:, None, :, None]
        return causal_mask(positions, spans.max_context, window)

    # The handles that pipeline-parallel models replace by dependent ones

    @property
    def keys(self) -> mx.array | None:
        """The layer's keys in the pool, ``[H_kv, num_blocks, block_size, D]``; None if empty."""
        return self.layer.arrays[0] if self.layer.is_written else None

    @keys.setter
    def keys(self, handle: mx.array) -> None:
        self.layer.depend_on(_checked("keys", handle, self.keys))

    @property
    def values(self) -> mx.array | None:
        """The layer's values in the pool, as `keys`."""
        return self.layer.arrays[1] if self.layer.is_written else None

    @values.setter
    def values(self, handle: mx.array) -> None:
        self.layer.depend_on(_checked("values", handle, self.values))

    # State

    @property
    def state(self) -> State:
        """``(rows, window, layer)``; a row is ``(key views, value views, tokens, key)``.

        The views are of the pool, ``[n, H_kv, tokens, D]`` for each run of adjacent blocks. To
        evaluate them evaluates the writes and copies nothing. Their content does not change.
        mlx-lm's own `save_prompt_cache` refuses the key and so writes no paged cache to a file.
        """
        states = [self._row_state(i) for i in range(len(self.rows))]
        return states, self.window, self.layer.index

    @state.setter
    def state(self, state: State) -> None:
        rows, window, _ = state
        self.window = narrowest(window, self.layer.pool.window)
        self._set_rows([self._restored(row) for row in rows], [row[2] for row in rows])

    def _row_state(self, i: int) -> RowState:
        row, num_tokens = self.rows[i], int(self.starts[i])
        key = row.pool, row.id, row.version
        if num_tokens <= 0:
            return None, None, num_tokens, key
        fork = row.fork_for(self.layer, is_frozen=True)
        k, v = self.layer.runs(fork, num_tokens)
        tags = {"sequence": fork, "layer": self.layer}
        keys, values = ([*(StateView.of(run, **tags) for run in runs)] for runs in (k, v))
        return keys, values, num_tokens, key

    def _restored(self, state: RowState) -> PagedSequence:
        """A fork of the sequence that the views show, or a new one with a copy of their content."""
        keys, values, num_tokens, key = state
        if keys and isinstance(keys[0], StateView) and keys[0].layer is self.layer:
            return keys[0].sequence.fork_for(self.layer)
        sequence = self.layer.pool.sequence_for(key, self.layer.index)
        if not keys or not values:
            return sequence
        k, v = (_contiguous(runs) for runs in (keys, values))
        self.layer.write_last([sequence], k, v, num_tokens)
        # k and v may be views of other blocks, and no graph orders this read before later writes.
        mx.eval(k, v, self.layer.kv.handles())
        return sequence

    # Content

    def is_trimmable(self) -> bool:
        """Whether no window has left a token, as in mlx-lm."""
        return self.window is None or int(self.starts.max(initial=0)) < self.window

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of every row, at most what the shortest row has.

        Returns:
            How many tokens of each row were forgotten.
        """
        n = max(0, min(n, int(self.starts.min()))) if self.rows else 0
        if n > 0 and not self.is_trimmable():
            raise ValueError(f"[trim] n is {n}: expected 0 where a row fills its window")
        self.starts = self.starts - np.int32(n)
        self._latest = None
        for row, start in zip(self.rows, self.starts.tolist(), strict=True):
            row.rewound[self.layer.index] = start
        return n

    def size(self) -> int:
        """Tokens of the longest row, at most the window."""
        longest = int(self.starts.max(initial=0))
        return min(longest, self.window or longest)

    def empty(self) -> bool:
        return self.size() == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that these rows hold: of a block with n sharers, each holds 1/n."""
        return self.layer.held_bytes(self.rows)


def _checked(name: str, handle: mx.array, present: mx.array | None) -> mx.array:
    if present is None or handle.shape != present.shape:
        raise ValueError(
            f"[PagedCache] {name} is set to an array of shape {handle.shape}: expected the "
            f"present {name} with a dependency added; set `state` to replace content"
        )
    return handle


def _contiguous(runs: Runs) -> mx.array:
    """Views of blocks ``[n, H_kv, tokens, D]`` as ``[1, H_kv, all tokens, D]``."""
    parts = [run.transpose(1, 0, 2, 3).flatten(1, 2)[None] for run in runs]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
