"""Calls of this package's pool ops, and the blocks that they read and write."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from tests.gpu_order.model.graph import Graph, Node
from tests.gpu_order.model.trace import Role

ROLES: dict[str, dict[int, Role]] = {
    "PagedAttention": {1: Role.POOL_READ, 2: Role.POOL_READ},
    "WriteKV": {2: Role.POOL_WRITE, 3: Role.POOL_WRITE},
    "CopyBlocks": {0: Role.POOL_WRITE, 1: Role.POOL_WRITE},
    "PoolRead": {0: Role.POOL_READ},
}
"""How each primitive binds its inputs that are the pool's, by index. The others are inputs."""

Blocks = tuple[set[int], set[int]]
"""Blocks that are read and blocks that are written."""


@dataclass(eq=False)
class Call:
    """A call of a pool op.

    Attributes:
        primitive: what does the work, perhaps behind views of its output.
        outputs: what the call returned.
        pools: the arrays of the pool that it was given.
        blocks: computes what it touches.
        stream: the index of the stream that it runs on.
        made_before: how many evals there were before.
        scales: which inputs are scales of the pool, counted from the last one.
    """

    primitive: str
    outputs: tuple[mx.array, ...]
    pools: tuple[mx.array, ...]
    blocks: Callable[[], Blocks]
    stream: int
    made_before: int
    scales: tuple[int, ...] = ()

    @property
    def writes(self) -> bool:
        return Role.POOL_WRITE in ROLES[self.primitive].values()

    def node_in(self, graph: Graph, name: str) -> Node | None:
        """The primitive's node, given the name of an output; None if it is evaluated already."""
        node = graph.producer.get(name)
        while node is not None and node.primitive != self.primitive:
            node = graph.producer.get(node.inputs[1 if node.primitive == "Select" else 0])
        return node


Recorder = Callable[..., None]
"""Takes a primitive, what its call returned, the pool's arrays, what computes the blocks, and which
inputs are scales."""


def recording(record: Recorder) -> dict[str, Callable[..., Any]]:
    """The functions of :mod:`mlx_paged.ops`, by name, which also record each call."""
    attend_all, attend_varlen = ops.paged_attention, ops.paged_attention_varlen
    attend_any, attend_again = ops.attend, ops.attend_known
    write, copy = ops.write_kv, ops.copy_blocks
    gather, take_runs, append = ops.gather_blocks, ops.take_from_pool, ops.append_kv

    def paged_attention(q, k_cache, v_cache, tables, lens, layer_idx=0, **options: Any) -> Any:
        out = attend_all(q, k_cache, v_cache, tables, lens, layer_idx, **options)
        pools = k_cache[layer_idx], v_cache[layer_idx]
        lengths, window = [q.shape[2]] * q.shape[0], options.get("window")
        scales = (-2, -1) if "k_scales" in options else ()
        read = lambda: _read(pools, tables, lens, lengths, window)  # noqa: E731
        record("PagedAttention", out, pools, read, scales)
        return out

    def paged_attention_varlen(
        q, k_cache, v_cache, tables, lens, cu_seqlens, layer_idx=0, **options: Any
    ) -> Any:
        arrays = q, k_cache, v_cache, tables, lens, cu_seqlens
        out = attend_varlen(*arrays, layer_idx, **options)
        pools, window = (k_cache[layer_idx], v_cache[layer_idx]), options.get("window")

        def blocks() -> Blocks:
            return _read(pools, tables, lens, np.diff(_host(cu_seqlens)).tolist(), window)

        record("PagedAttention", out, pools, blocks, (-3, -2) if "k_scales" in options else ())
        return out

    def attend(q, kv, tables, lens, is_known, cu_seqlens=None, *num_decodes, **options: Any) -> Any:
        out = attend_any(q, kv, tables, lens, is_known, cu_seqlens, *num_decodes, **options)
        pools, window = tuple(kv[:2]), options.get("window")

        def blocks() -> Blocks:
            if cu_seqlens is None:
                lengths = [q.shape[2]] * q.shape[0]
            else:
                lengths = np.diff(_host(cu_seqlens)).tolist()
            return _read(pools, tables, lens, lengths, window)

        behind = (cu_seqlens is not None) + (options.get("shared_prefixes") is not None)
        scales = (-2 - behind, -1 - behind) if kv.is_quantized else ()
        record("PagedAttention", out, pools, blocks, scales)
        return out

    def write_kv(k, v, k_cache, v_cache, slots, **options: Any) -> Any:
        written = write(k, v, k_cache, v_cache, slots, **options)
        scales = (-2, -1) if "k_scales" in options else ()
        record("WriteKV", written, (k_cache, v_cache), lambda: _written(k_cache, slots), scales)
        return written

    def attend_known(q, stored, layer, forward, known, scale) -> Any:
        out = attend_again(q, stored, layer, forward, known, scale)
        if out is None:
            return None
        pools = stored[0][layer], stored[1][layer]
        tables, lens, lengths = forward.block_tables, forward.context_lens, [q.shape[2]] * len(q)
        read = lambda: _read(pools, tables, lens, lengths, known.window)  # noqa: E731
        scales = (-2 - known.shares, -1 - known.shares) if len(stored) > 2 else ()
        record("PagedAttention", out, pools, read, scales)
        return out

    def append_kv(*given: Any) -> Any:
        stored, layer, forward, _ = given[-4:]
        pools = stored[0][layer], stored[1][layer]
        found = append(*given)
        if found is None:
            return None
        written = [handles[layer] for handles in stored]
        has_scales = len(written) > 2
        of_write, of_read = ((-2, -1), (1,)) if has_scales else ((), ())
        slots, tables = forward.slot_mapping, forward.row_tables
        record("WriteKV", tuple(written), pools, lambda: _written(pools[0], slots), of_write)
        columns = -(-forward.max_context // pools[0].shape[2])
        for pool, read in zip(written[:2], found, strict=True):
            blocks = lambda: (_inside(pools[0], tables, columns), set())  # noqa: E731
            record("PoolRead", read, (pool,), blocks, of_read)
        return found

    def copy_blocks(k_cache, v_cache, pairs, **options: Any) -> Any:
        copied = copy(k_cache, v_cache, pairs, **options)
        record("CopyBlocks", copied, (k_cache, v_cache), lambda: _copied(k_cache, pairs))
        return copied

    def gather_blocks(
        cache: mx.array, tables: mx.array, num_tokens: int, runs: mx.array | None = None
    ) -> mx.array:
        out = gather(cache, tables, num_tokens, runs)
        columns = -(-num_tokens // cache.shape[2])
        record("PoolRead", out, (cache,), lambda: (_inside(cache, tables, columns), set()))
        return out

    def take_from_pool(runs: mx.array, indices: mx.array) -> mx.array:
        """Rows ``[num_blocks * heads, ...]``; `indices` ``[heads, n]``."""
        out = take_runs(runs, indices)
        heads = indices.shape[0]
        record("PoolRead", out, (), lambda: (set((_host(indices) // heads).flat), set()))
        return out

    return {
        function.__name__: function
        for function in (
            *(paged_attention, paged_attention_varlen, attend, attend_known, write_kv),
            *(append_kv, copy_blocks, gather_blocks, take_from_pool),
        )
    }


def blocks_of_a_decode(
    cache: mx.array, indices: Sequence[mx.array], window: int | None
) -> Callable[[], Blocks]:
    """What an op of a decode step touches. `indices`: the slots that it writes, or the block tables
    and the context lengths by which it reads."""

    def blocks() -> Blocks:
        if len(indices) == 1:
            return _written(cache, indices[0])
        tables, lens = indices
        return _read((cache,), tables, lens, [1] * len(lens), window)

    return blocks


def _read(
    pools: tuple[mx.array, ...],
    tables: mx.array,
    lens: mx.array,
    lengths: Sequence[int],
    window: int | None,
) -> Blocks:
    _, num_blocks, size, _ = pools[0].shape
    read: set[int] = set()
    rows = zip(_host(tables), _host(lens).tolist(), lengths, strict=True)
    for table, context, length in rows:
        first = 0 if window is None else max(0, context - length - window + 1)
        read.update(table[first // size : -(-context // size)].tolist())
    return {block for block in read if 0 <= block < num_blocks}, set()


def _written(cache: mx.array, slots: mx.array) -> Blocks:
    _, num_blocks, size, _ = cache.shape
    blocks: Iterable[int] = (_host(slots).reshape(-1) // size).tolist()
    return set(), {block for block in blocks if 0 <= block < num_blocks}


def _copied(cache: mx.array, pairs: mx.array) -> Blocks:
    sources, targets = _host(pairs).T.tolist()
    return set(sources), set(targets)


def _inside(cache: mx.array, tables: mx.array, columns: int) -> set[int]:
    blocks: Iterable[int] = _host(tables)[:, :columns].flat
    return {int(block) for block in blocks if 0 <= block < cache.shape[1]}


def _host(array: mx.array) -> np.ndarray:
    return np.asarray(array)
