"""What computes the calls of one kind of layer: decided once for each kind of call."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.attention.causal import Causal
from mlx_paged.attention.paths import FEW_QUERIES, max_paged_queries_of
from mlx_paged.kv.pool import KVPool


class Way(NamedTuple):
    """What computes one kind of call."""

    # Tokens of a sequence up to which the paged op attends. MLX's own attention computes longer
    # chunks, and all that the GPU's compiler refuses.
    limit: int
    is_compiled: bool  # whether a kernel of this package computes the op; no: plain MLX does
    shares: bool  # whether that kernel reads shared keys once


class AttentionBackend:
    """The ways of the layers of one kind, kept once they are known.

    Layers that store the same for a token, in blocks of one size, may share a backend.

    Attributes:
        ways: by the properties of a call that choose its way.
        writes: whether rows are written in place, by their properties.
        write: what writes the rows; None: not known, or plain MLX.
        attention: the latest call of the layers whose queries see the same, so that a call like it
            takes no way through Python: ``Forward.size``, `few_queries` of :func:`way_of`, and what
            computes the call.
    """

    def __init__(self) -> None:
        self.ways: dict[Hashable, Way] = {}
        self.writes: dict[Hashable, bool] = {}
        self.write: ops.KnownWrite | None = None
        self.attention: dict[Causal, tuple[Hashable, int, ops.KnownAttention]] = {}
        self._sinks: tuple[mx.array, mx.array] | None = None  # as given, and in float32

    def float32(self, sinks: mx.array) -> mx.array:
        """The sinks in float32, converted once for as long as a layer gives the same array."""
        if sinks.dtype == mx.float32:
            return sinks
        if self._sinks is None or not ops.are_one(sinks, self._sinks[0]):
            self._sinks = ops.view_as(mx.array, sinks), sinks.astype(mx.float32)
        return self._sinks[1]


def way_of(
    q: mx.array,
    pool: KVPool,
    layer: int,
    few_queries: int,
    width: int,
    columns: int | None,
    num_sharing: int,
    **options: Any,
) -> Way:
    """The way of a call. It asks the GPU's compiler, which may refuse a kernel.

    Args:
        few_queries: tokens of a sequence up to which the paged op attends in every layer.
        width: blocks of a table.
        columns: tokens of each sequence; None: their numbers differ.
        num_sharing: sequences of which some begin with the same blocks; 0: none is known to.
        options: as of ``ops.takes_attention``.
    """
    shape, caches = pool.shapes[layer], (pool.k[layer], pool.v[layer])

    def takes(tokens: int | None, sequences: int = 1) -> bool:
        return ops.takes_attention(q, *caches, width, tokens, sequences=sequences, **options)

    limit = few_queries
    if q.dtype == shape.dtype:
        limit = max_paged_queries_of(shape, few_queries)
    if limit and few_queries == FEW_QUERIES:
        if not (ops.attends(q, *caches, False) and takes(1)):
            limit = 0  # plain MLX gathers K/V once, in their own type, for MLX's attention
        elif limit > FEW_QUERIES and not takes(None):
            limit = FEW_QUERIES
    if not limit or (columns is not None and columns > limit):
        return Way(limit, is_compiled=False, shares=False)
    lengths = (1, None) if columns is None else (columns,)
    is_compiled = ops.attends(q, *caches, columns is None) and all(map(takes, lengths))
    shares = num_sharing > 0 and is_compiled
    if shares and columns is not None:
        shares = takes(columns, num_sharing)
    return Way(limit, is_compiled, shares)
