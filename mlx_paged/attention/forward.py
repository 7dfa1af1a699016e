"""One forward, and how one layer attends in it: through block tables or over gathered blocks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.attention.backend import AttentionBackend, Way, way_of
from mlx_paged.attention.causal import FULL, Causal
from mlx_paged.attention.paths import (
    ANY_NUMBER,
    FEW_QUERIES,
    LONG_CHUNK,
    is_fused,
    is_fused_if_long,
)
from mlx_paged.attention.sdpa_hook import (
    AttendingCache,
    KeysHandle,
    KVHandle,
    Query,
    RotaryHandle,
    ValuesHandle,
    mlx_attention,
)
from mlx_paged.kv.pool import KVPool
from mlx_paged.ops.dispatch import MOST_TOGETHER, SHORT_CONTEXT
from mlx_paged.ops.layer_kv import LayerKV

SCORES = 1 << 25  # so many are in memory at once
GATHERED = 1 << 25
"""Elements of the keys and values that rows of decodes gather at once, unless one row has more."""

path_counts: Counter[str] = Counter()  # how often each path was called since the process began


def causal_mask(queries: mx.array, num_keys: int, sees: Causal, first: int = 0) -> mx.array:
    """Which keys at positions ``[first, num_keys)`` the queries at these positions see."""
    keys = mx.arange(first, num_keys)
    mask = keys <= queries
    return mask if sees.is_full else mask & sees.are_near(keys, queries)


def even_length(num_blocks: int) -> int:
    """As many blocks or up to a quarter more: few different numbers. Of arrays that grow from chunk
    to chunk, none could take the memory of an earlier one."""
    step = max(1, (1 << (num_blocks - 1).bit_length()) // 8)
    return -(-num_blocks // step) * step


def after(array: mx.array, earlier: Sequence[mx.array]) -> mx.array:
    """The array, which MLX then computes after the last one of `earlier`. MLX evaluates a graph
    breadth first: what is computed from parts of an array would be in memory at once."""
    return mx.depends([array], [earlier[-1]])[0] if earlier else array


def head_runs(tables: mx.array, n_kv_heads: int) -> mx.array:
    """The index of each head's part of each block, ``[B, n_kv_heads, M]``, in an array of the pool
    whose blocks and heads are one axis. `tables` are block tables, ``[B, M]``."""
    return tables[:, None] * n_kv_heads + mx.arange(n_kv_heads, dtype=mx.int32)[:, None]


class GatheredKeys(NamedTuple):
    """How the keys of a chunk are gathered."""

    wanted: tuple[mx.array, int, mx.array]  # as :meth:`KVPool.gather` takes it
    mask: mx.array | str  # which of these keys each token sees


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive tokens of one sequence, attended together."""

    # Index of the chunk's first token: among the forward's rows, or among the columns of its row.
    first: int
    start: int  # position of its first token
    length: int  # number of its tokens
    block_ids: mx.array  # ``[n]`` int32, blocks of the sequence up to the chunk's end
    _keys: dict[tuple[Causal, int, int], GatheredKeys] = field(default_factory=dict, init=False)

    @property
    def stop(self) -> int:
        """Position after its last token: the number of tokens that this one attends to."""
        return self.start + self.length

    def keys(self, sees: Causal, n_kv_heads: int, block_size: int) -> GatheredKeys:
        """The keys of the blocks that a token sees. Layers with the same arguments share arrays."""
        sees = sees.within(self.stop)
        kind = sees, n_kv_heads, block_size
        if kind not in self._keys:
            first = 0
            mask: mx.array | str = "causal"
            if not sees.is_full:
                first = sees.first_key(self.start) // block_size * block_size
                queries = mx.arange(self.start, self.stop)[:, None]
                mask = causal_mask(queries, self.stop, sees, first)
            start, last = first // block_size, self.block_ids.size - 1
            columns = mx.minimum(mx.arange(start, start + even_length(last + 1 - start)), last)
            table = self.block_ids[columns][None]
            wanted = table, self.stop - first, head_runs(table, n_kv_heads)
            self._keys[kind] = GatheredKeys(wanted, mask)
        return self._keys[kind]


@dataclass(eq=False)
class Forward:
    """What the layers that share their block tables know of one forward.

    The queries of a layer are ``[rows, H, columns, D]``. Each row is a sequence, unless
    `cu_seqlens` says which rows of one column are the tokens of each sequence.
    """

    columns: int  # tokens in each row
    positions: mx.array  # ``[rows * columns]`` int32, of each token in its sequence
    # ``[rows * columns]`` int32, the slot for each token's K/V; None: K/V is stored already.
    slot_mapping: mx.array | None
    block_tables: mx.array  # ``[B, M]`` int32, of the sequences
    context_lens: mx.array  # ``[B]`` int32, tokens of each sequence, these included
    max_context: int  # tokens of the longest context: gathered keys have this length
    # Position of the first token of each row, ``[rows]`` int32; an int if there is one chunk only.
    offset: int | mx.array
    next_offset: int | mx.array  # the position after the last token of each row, likewise
    # ``[B + 1]`` int32: sequence s has the rows ``cu_seqlens[s]`` to ``cu_seqlens[s + 1] - 1``. No
    # sequence has fewer rows than the sequence before it.
    cu_seqlens: mx.array | None = None
    chunks: Sequence[Chunk] = ()  # the sequences of several rows: the last ones of the forward
    # Each row as a chunk, where rows have more columns than the paged op takes. None stands for a
    # row of padding.
    row_chunks: Sequence[Chunk | None] = ()
    # ``[rows, 1, S, 1]`` bool, which of the gathered keys each row holds; None: all of them.
    held: mx.array | None = None
    # ``[rows, M]`` int32, the block table of every row; None: `block_tables`.
    row_tables: mx.array | None = None
    # ``[2, B]`` int32, which sequences begin with the same blocks: see ``paged_attention``.
    shared_prefixes: mx.array | None = None
    is_read: bool = True  # whether the output of attention is used
    is_traced: bool = False  # ``mx.compile`` traces the forward, which nothing differentiates
    gathers: bool = field(default=False, init=False)  # whether a layer gathered its keys
    _runs: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict, init=False)

    @cached_property
    def size(self) -> tuple[int, int | None, int]:
        """Blocks of a table; tokens of each sequence, None if their numbers differ; sequences of
        which some are known to begin with the same blocks. Larger numbers than those that a way
        depends on are one number, so that layers keep few ways."""
        num_sequences, width = self.block_tables.shape
        columns = min(self.columns, LONG_CHUNK) if self.cu_seqlens is None else None
        num_sharing = 0 if self.shared_prefixes is None else min(num_sequences, MOST_TOGETHER)
        return width, columns, num_sharing

    @cached_property
    def arrays(self) -> ops.ForwardArrays:
        """What the device reads of it."""
        tables = self.block_tables if self.row_tables is None else self.row_tables
        of_sequences = self.block_tables, self.context_lens, self.shared_prefixes
        return ops.ForwardArrays(
            self.slot_mapping, *of_sequences, tables, self.max_context, self.held
        )

    def replace_tables(self, block_tables: mx.array) -> None:
        """Read the K/V through other block tables of the same shape."""
        self.block_tables = block_tables
        vars(self).pop("arrays", None)

    def runs(self, tables: mx.array, heads: int) -> mx.array:
        """:func:`head_runs` of each block table. Layers that ask one after the other share them."""
        if heads not in self._runs or self._runs[heads][0] is not tables:
            self._runs[heads] = tables, head_runs(tables, heads)
        return self._runs[heads][1]

    def mask(self, columns: int, sees: Causal) -> mx.array | None:
        """``[rows, 1, columns, S]`` bool over gathered keys: what the last `columns` tokens of each
        row see. None: one token, which sees all of them."""
        positions = self.positions
        if positions.size == columns == 1 and sees.is_full and not self.is_traced:
            return None
        if columns != self.columns:
            stops = mx.array(self.next_offset).reshape(-1, 1)
            positions = stops - columns + mx.arange(columns)
        return causal_mask(positions.reshape(-1, 1, columns, 1), self.max_context, sees)


class LayerView(AttendingCache):
    """One layer of the pool in one forward: the cache that the layer's handles name.

    Latent layers (MLA) store latents and rotary keys side by side. They attend to the latents in
    place; as keys and values of one call they are gathered.
    """

    forward: Forward

    def __init__(
        self,
        pool: KVPool,  # holds the K/V
        layer: int,  # index of this layer in the pool
        sees: Causal = FULL,  # which keys a query of this layer sees
        # Tokens of a sequence up to which the paged op attends in every layer.
        max_paged_queries: int = ANY_NUMBER,
        forward: Forward | None = None,  # may also be set later
        backend: AttentionBackend | None = None,  # of layers of this kind; None: its own
    ) -> None:
        self.pool = pool
        self.layer = layer
        self.sees = sees
        self.shape = pool.shapes[layer]
        self.is_latent = self.shape.latent
        self._block_size = pool.k[layer].shape[2]
        self._few_queries = max_paged_queries
        self._backend = AttentionBackend() if backend is None else backend
        if forward is not None:
            self.forward = forward

    def in_forward(self, forward: Forward) -> Self:
        """The same layer in another forward."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, forward=forward)
        return view

    def append(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle] | None:
        """Write K/V of the forward, and return handles as `keys_and_values`; None, and nothing is
        written, if one call cannot do both."""
        known = self._backend.write or self._known_write(keys)
        if known is None:
            return None
        stored, layer = self.pool.stored, self.layer
        kinds = KeysHandle, ValuesHandle
        return ops.append_kv(*kinds, self, keys, values, stored, layer, self.forward.arrays, known)

    def _known_write(self, keys: mx.array) -> ops.KnownWrite | None:
        """What writes rows like `keys`; None: no call writes and reads them."""
        if self.is_latent or ops.is_transforming():  # what is asked within one is not kept
            return None
        slots, writes, backend = self.forward.slot_mapping, self._backend.writes, self._backend
        assert slots is not None
        kind = keys.dtype, mx.default_device() == mx.cpu
        if kind not in writes:
            writes[kind] = self.pool.writes_in_place(self.layer, keys, slots)
        if writes[kind] and keys.dtype == self.shape.dtype:
            backend.write = ops.KnownWrite(keys.dtype, self.shape.rotates)
        return backend.write

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        """Handles to all K/V of the forward's sequences, ``[rows, H_kv, S, D]``."""
        k, v = self.pool.read(self.layer, self._gathered, as_written=True)
        keys = KVHandle.of(k, cache=self, role="keys")
        kind = RotaryHandle if self.is_latent else KVHandle
        return keys, kind.of(v, cache=self, role="values")

    def _gathered(self, cache: mx.array) -> mx.array:
        forward = self.forward
        tables = forward.block_tables if forward.row_tables is None else forward.row_tables
        runs = forward.runs(tables, cache.shape[0])
        found = ops.gather_blocks(cache, tables, forward.max_context, runs)
        return found if forward.held is None else mx.where(forward.held, found, 0)

    def contiguous(self, block_ids: mx.array, num_tokens: int) -> tuple[mx.array, mx.array]:
        """A copy of one sequence's K/V, ``[1, H_kv, num_tokens, D]`` each, as a model stores it."""
        wanted = block_ids[None], num_tokens
        return self.pool.read(self.layer, lambda a: ops.gather_blocks(a, *wanted), as_written=True)

    def mask(self, columns: int, sees: Causal) -> mx.array | None:
        return self.forward.mask(columns, sees)

    def attend(self, query: Query) -> mx.array | None:
        """Outputs of padding have no meaning. None if the query does not fit what the layer stores,
        or has another number of columns than the forward, or if MLX transforms the model (then the
        derivatives are those of MLX's own attention)."""
        q, forward = query.q, self.forward
        if not forward.is_traced and ops.is_transforming():
            return None
        if q.shape[2] != forward.columns or self.is_latent == (query.rotary is None):
            return None
        if not forward.is_read:
            shape = (*q.shape[:3], self.shape.v_head_dim)
            return mx.broadcast_to(mx.zeros((), q.dtype), shape)
        if query.rotary is not None:
            q = mx.concatenate([q, (query.rotary / query.scale).astype(q.dtype)], axis=-1)
            query = query._replace(q=q, rotary=None)
        if query.sees is not self.sees:  # the mask is another layer's
            query = query._replace(sees=query.sees.narrowed(self.sees))
        way = self._way(query)
        if forward.columns > max(FEW_QUERIES, way.limit):
            return self._row_by_row(query)
        if forward.cu_seqlens is not None:
            return self._ragged(query, forward.cu_seqlens, way)
        if forward.columns <= way.limit:
            self._know(query, way)
            arrays = forward.block_tables, forward.context_lens
            return self.through_tables(query, way, *arrays, None, 0, forward.shared_prefixes)
        return self.gathered_rows(query, forward.block_tables, forward.context_lens)

    def attend_again(self, q: mx.array, scale: float) -> mx.array | None:
        forward, kept = self.forward, self._backend.attention.get(self.sees)
        if kept is None or not forward.is_read:
            return None
        size, few_queries, known = kept
        if size != forward.size or few_queries != self._few_queries:
            return None
        out = ops.attend_known(q, self.pool.stored, self.layer, forward.arrays, known, scale)
        if out is not None:
            path_counts["paged"] += 1
        return out

    def _know(self, query: Query, way: Way) -> None:
        """Keep what computes calls like this one, if :meth:`attend_again` can make them."""
        is_own = query.sinks is None and query.sees is self.sees
        if is_own and way.is_compiled and not self.is_latent and not ops.is_transforming():
            kind = {"shares": way.shares, "rotates": self.shape.rotates}
            known = ops.KnownAttention(query.q, **kind, **self.sees.options)
            self._backend.attention[self.sees] = self.forward.size, self._few_queries, known

    def _way(self, query: Query) -> Way:
        """What computes the query: asked once for each kind of call."""
        q, ways = query.q, self._backend.ways
        options = query.sees.is_full, query.sinks is None
        width, columns, num_sharing = size = self.forward.size
        is_long = width * self._block_size > SHORT_CONTEXT
        kind = (
            *(q.dtype, q.shape[1], options, is_long, columns, num_sharing),
            *(self._few_queries, mx.default_device() == mx.cpu),
        )
        way = ways.get(kind)
        if way is None:
            call = q, self.pool, self.layer, self._few_queries, *size
            way = ways[kind] = way_of(*call, **query.sees.options, sinks=query.sinks)
        return way

    def _ragged(self, query: Query, cu_seqlens: mx.array, way: Way) -> mx.array:
        """Short sequences by the paged op, all at once; each of the others by MLX's attention."""
        q, forward, limit = query.q, self.forward, way.limit
        tables, lens, num_chunks = forward.block_tables, forward.context_lens, len(forward.chunks)
        num_decodes = tables.shape[0] - num_chunks
        chunks = [chunk for chunk in forward.chunks if chunk.length > limit]
        if not chunks:
            shared = forward.shared_prefixes
            return self.through_tables(query, way, tables, lens, cu_seqlens, num_decodes, shared)
        parts, forward.gathers = [], True
        if num_rows := chunks[0].first:
            count = tables.shape[0] - len(chunks)
            short, arrays = query._replace(q=q[:num_rows]), (tables[:count], lens[:count])
            if limit:
                ragged = cu_seqlens[: count + 1], num_decodes
                parts.append(self.through_tables(short, way, *arrays, *ragged))
            else:
                parts.append(self.gathered_rows(short, *arrays))
        for chunk in chunks:
            tokens = q[chunk.first : chunk.first + chunk.length].transpose(2, 1, 0, 3)
            out = self.gathered_chunk(query._replace(q=tokens), chunk, parts)
            parts.append(out.transpose(2, 1, 0, 3))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def _row_by_row(self, query: Query) -> mx.array:
        """MLX's own attention, one row after the other, each over its own context."""
        q, rows = query.q, []
        self.forward.gathers = True
        for i, chunk in enumerate(self.forward.row_chunks):
            if chunk is None:
                rows.append(mx.zeros((1, *q.shape[1:3], self.shape.v_head_dim), q.dtype))
                continue
            stop = chunk.first + chunk.length
            tokens = q[i : i + 1, :, chunk.first : stop]
            out = self.gathered_chunk(query._replace(q=tokens), chunk, rows)
            widths = [(0, 0), (0, 0), (chunk.first, q.shape[2] - stop), (0, 0)]
            rows.append(out if chunk.length == q.shape[2] else mx.pad(out, widths))
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)

    def through_tables(
        self,
        query: Query,
        way: Way,
        tables: mx.array,
        context_lens: mx.array,
        cu_seqlens: mx.array | None = None,
        num_decodes: int = 0,
        shared_prefixes: mx.array | None = None,
    ) -> mx.array:
        """The last L tokens of B sequences, ``q [B, H, L, D]``, by the paged op; with `cu_seqlens`
        the last tokens of each, ``q [T, H, 1, D]``. The arrays are those of the op."""
        path_counts["paged"] += 1
        layer, sinks = self.layer, query.sinks
        if sinks is not None and not self.forward.is_traced:
            sinks = self._backend.float32(sinks)
        q = self._transformed(query.q)
        out = ops.attend(
            q,
            LayerKV(*[handles[layer] for handles in self.pool.stored]),
            tables,
            context_lens,
            way.is_compiled,
            cu_seqlens,
            num_decodes,
            scale=query.scale,
            **query.sees.options,
            sinks=sinks,
            shared_prefixes=shared_prefixes if way.shares else None,
        )
        return self._transformed(out) if self.shape.rotates else out

    def gathered_rows(self, query: Query, tables: mx.array, context_lens: mx.array) -> mx.array:
        """As `through_tables`, by MLX's own attention; all blocks of the tables are gathered. Some
        rows after the others where these are many."""
        path_counts["gather"] += 1
        self.forward.gathers = True
        num_keys, (num_rows, _, length, _) = tables.shape[1] * self._block_size, query.q.shape
        runs = self.forward.runs(tables, self.shape.n_kv_heads)
        first_queries = context_lens[:, None, None, None] - length
        q, parts = self._transformed(query.q), list[mx.array]()
        count = max(1, GATHERED // (num_keys * self.shape.elements))
        for first in range(0, num_rows, count):
            part = slice(first, first + count)
            arrays = q, tables, runs, first_queries
            if count < num_rows:
                arrays = q[part], tables[part], runs[part], first_queries[part]
            of_rows, row_tables, blocks, queries = arrays
            k, v = self.pool.gather(self.layer, row_tables, num_keys, after(blocks, parts))
            mask = causal_mask(queries + mx.arange(length)[:, None], num_keys, query.sees)
            v = mx.where(mask.any(axis=2)[..., None], v, 0)  # a weight of 0 does not hide a NaN
            out = mlx_attention(of_rows, k, v, scale=query.scale, mask=mask, sinks=query.sinks)
            parts.append(out)
        return self._transformed(parts[0] if len(parts) == 1 else mx.concatenate(parts))

    def gathered_chunk(
        self, query: Query, chunk: Chunk, earlier: Sequence[mx.array] = ()
    ) -> mx.array:
        """Causal attention of one chunk's queries ``[1, H, L, D]`` over its sequence, by MLX's own
        attention; only blocks with keys that a query sees are gathered, after the `earlier` arrays
        were computed. Some queries after the others where their scores are in memory."""
        path_counts["gather"] += 1
        keys = chunk.keys(query.sees, self.shape.n_kv_heads, self._block_size)
        table, num_tokens, runs = keys.wanted
        k, v = self.pool.gather(self.layer, table, num_tokens, after(runs, earlier))
        (_, heads, length, _), mask, num_keys = query.q.shape, keys.mask, k.shape[2]
        parts: list[mx.array] = []
        q = self._transformed(query.q)
        is_whole = is_fused(self.shape) or is_fused_if_long(self.shape, q, mask)
        rows = length if is_whole else max(32, SCORES // (heads * num_keys))
        for first in range(0, length, rows):
            end = min(first + rows, length)
            seen = num_keys - (length - end)
            parts.append(
                mlx_attention(
                    after(q[:, :, first:end], parts),
                    k[:, :, :seen],
                    v[:, :, :seen],
                    scale=query.scale,
                    mask=mask if isinstance(mask, str) else mask[first:end, :seen],
                    sinks=query.sinks,
                )
            )
        return self._transformed(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2))

    def _transformed(self, array: mx.array) -> mx.array:
        """Queries as the layer stores its keys, or outputs back."""
        return ops.hadamard(array) if self.shape.rotates else array
