"""Trace a model once to find what its layers store and how its tokens may be batched."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.arguments import require
from mlx_paged.attention.causal import FULL, Causal, causal, limits, widest
from mlx_paged.attention.prewarm import AttentionKind
from mlx_paged.attention.sdpa_hook import (
    AttendingCache,
    KVHandle,
    Query,
    RotaryHandle,
    UnknownAttentionError,
    attention_hook,
)
from mlx_paged.kv.layer_groups import LayerPlace, PoolPlan, plan_pool
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv.shapes import KVShape
from mlx_paged.options import PoolConfig
from mlx_paged.runner.hosted_model import HostedModel
from mlx_paged.runner.layer_cache import PagedLayerCache, UntrimmedCache, storable
from mlx_paged.runner.recurrent_rows import RecurrentRows, Run, WatchedStates, empty_like
from mlx_paged.runner.skip_unsampled import LastLayer, LogitRows
from mlx_paged.runner.state_profile import StateProfile

REFUSED = {
    "phi3small": (
        "its sparse layers in mlx-lm add the mask to the scores: tokens see later tokens"
    ),
    "plamo3": "in mlx-lm its decode and its full forward use different sliding windows",
}
ONE_AT_A_TIME = {
    "afm7": "layers that reuse K/V take their rotary offset from the shape of gathered keys",
    "minimax_m3_vl": "its sparse layers place every query at the end of the longest sequence",
}
TRACE_ROWS = 11
"""Rows of the batched trace: no usual number of heads, so that a wrong mask shape raises."""
SAMPLED_ROWS = (0, 1, 3, 4, 6, 8, 10)
"""The rows of that trace that the last layer computes; their number is as unusual."""


class UnsupportedModelError(ValueError):
    """The model would give wrong results; the message says why."""


def require_model(caller: str, name: str, model: object) -> None:
    """Raise ValueError unless `model` has the form of an mlx-lm model."""
    is_model = hasattr(model, "layers") or hasattr(model, "make_cache")
    require(is_model, caller, name, model, "a model, the first value of mlx_lm.load(path)")


class Batching(StrEnum):
    """Which tokens may share a forward."""

    MIXED = "mixed"  # any: prompt chunks and decodes, a row each
    ALTERNATE = "alternate"  # all decodes together, every prompt chunk alone
    SINGLE = "single"  # one sequence


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """How the engine runs a model.

    Attributes:
        shapes: K/V of each attention layer, in the order of the cache's leaves; None for a layer
            that stores nothing. If a layer's decodes attend to a latent as keys and as values, the
            layer stores the latent once.
        batching: MIXED if every layer attends through the hook. Some layers need ALTERNATE:
            recurrent layers that compute no rows, layers that read gathered K/V would gather
            once for each row, and latent attention would apply its up-projections to each row of a
            chunk. SINGLE if the model cannot compute a ragged batch.
        states: what its recurrent layers keep instead of K/V.
        attentions: the kinds of attention of its layers, each once.
        chunk_attentions: the attention of each layer for the tokens of a chunk; that of its decodes
            where a layer with latents computes the keys and values of each head for a chunk.
        sees: for each entry of `shapes` which tokens a query sees.
        last_layer_narrows: the last layer can compute only the sampled tokens of a MIXED batch.
        embedding_rows: ids of the model's input are below it.
        logit_columns: tokens that the model can choose have ids below it.
        heads_take_rows: the output projection can compute some of a forward's rows, and the output
            then has these rows alone.
        decodes_gather: whether a layer gathers the K/V that its decodes attend to.
    """

    shapes: tuple[KVShape | None, ...]
    batching: Batching
    states: StateProfile
    attentions: tuple[AttentionKind, ...]
    chunk_attentions: tuple[AttentionKind, ...]
    sees: tuple[Causal, ...]
    last_layer_narrows: bool
    embedding_rows: int
    logit_columns: int
    heads_take_rows: bool
    decodes_gather: bool

    def stored_by(self, config: PoolConfig) -> "ModelProfile":
        """The profile of the model with K/V that is stored as the options say.

        Raises:
            ValueError: a layer's K/V cannot be stored with these `kv_bits`, or there are no states
                to store with these `snapshot_bits`.
        """
        kv_bits = config.kv_bits
        shapes = tuple(s and s.quantized("Engine", kv_bits) for s in self.shapes)
        kinds = (replace(k, shape=k.shape.quantized("Engine", kv_bits)) for k in self.attentions)
        states = self.states.stored_by(config)
        return replace(self, shapes=shapes, attentions=tuple(kinds), states=states)

    def pool_plan(self, block_size: int, shares: bool = True) -> PoolPlan:
        """How its layers share a pool; `shares`: whether also arrays, if what they see differs."""
        return plan_pool(self.shapes, limits(self.sees), block_size, shares)

    @property
    def read_bytes(self) -> list[tuple[int | None, int]]:
        """Of each layer that stores K/V: how many tokens a query sees at most (None: all), and the
        bytes of a token."""
        layers = zip(limits(self.sees), self.shapes, strict=True)
        return [(most, shape.token_bytes) for most, shape in layers if shape is not None]


class _Recorder(AttendingCache, UntrimmedCache):
    """An empty cache that records what a layer stores and whether its attention can be diverted."""

    def __init__(self, rows: int, sees: Causal) -> None:
        self.rows = rows
        self.sees = FULL  # so that masks are those that the model asks for
        self.layer_sees = sees
        self.shape: KVShape | None = None
        self.attentions: list[AttentionKind] = []  # of all layers that attend to it
        self.seen: set[Causal] = set()  # by all attention to the layer's K/V
        self.offset: int | mx.array = 0 if rows == 1 else mx.zeros(rows, mx.int32)
        self._is_narrowed = False

    def narrow(self, rows: int) -> None:
        """From now on calls have only so many rows; their masks still have all rows."""
        self.rows = rows
        self.offset = mx.zeros(rows, mx.int32)
        self._is_narrowed = True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        if values.dtype != keys.dtype:
            raise UnsupportedModelError(f"keys are {keys.dtype} but values {values.dtype}")
        values = storable(values)
        self.shape = KVShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        self.keys, self.values = keys, values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        keys = KVHandle.of(self.keys, cache=self, role="keys")
        return keys, RotaryHandle.of(self.values, cache=self, role="values")

    def mask(self, columns: int, sees: Causal) -> mx.array:
        return mx.broadcast_to(mx.tri(columns, dtype=mx.bool_), (self.rows, 1, columns, columns))

    @property
    def found(self) -> list[AttentionKind]:
        """The kinds of attention to its K/V. If none was recorded: that of as many heads as store
        keys."""
        if self.attentions or self.shape is None:
            return self.attentions
        shape = self.shape
        return [AttentionKind(shape, shape.n_kv_heads, shape.dtype, self.layer_sees, False)]

    def attend(self, query: Query) -> mx.array | None:
        shape, q = self.shape, query.q
        assert shape is not None
        if query.rotary is not None:
            rank, rope = shape.row_dims
            self.shape = shape = replace(shape, head_dim=rank + rope, v_head_dim=rank, latent=True)
        sees = self.layer_sees if query.sees.is_full else query.sees
        self.seen.add(sees)
        has_sinks = query.sinks is not None
        self.attentions.append(AttentionKind(shape, q.shape[1], q.dtype, sees, has_sinks))
        return mx.zeros((*q.shape[:3], shape.v_head_dim)) if self._is_narrowed else None


def probe(model: nn.Module) -> ModelProfile:
    """How the engine runs a model, found by traces of forwards of a chunk and of batches. Nothing
    of them is evaluated.

    Raises:
        UnsupportedModelError: the model or one of its caches would give wrong results.
    """
    name = model_type(model)
    if name in REFUSED:
        raise UnsupportedModelError(f"model type {name} is refused: {REFUSED[name]}")
    caches = list(leaves(_trace(model, rows=1, length=2)))
    embedding_rows, logit_columns = _sizes(model)
    chunk = _recorders(caches)
    states = _watched(caches)
    recurrent = bool(states)
    diverted = all(leaf.attentions for leaf in chunk if leaf.shape is not None)
    diverts_states = recurrent and _diverts_states(model, states)
    are_rows = diverted and (diverts_states or not recurrent)
    batching = Batching.MIXED if are_rows else Batching.ALTERNATE
    decode = None
    is_alone = isinstance(model, HostedModel) and model.one_at_a_time
    if name not in ONE_AT_A_TIME and not is_alone:
        try:
            decode = _recorders(_trace(model, rows=TRACE_ROWS, length=1))
        except UnsupportedModelError:
            raise
        except (ValueError, TypeError):  # a row cannot have a position and mask of its own
            pass
    if decode is None:
        batching = Batching.SINGLE
    recorded = list(zip(decode or chunk, chunk, strict=True))
    # A layer stores what its decodes attend to, if these are latents.
    layers = [own if own.shape and own.shape.latent else other for own, other in recorded]
    kinds = [kind for leaf in layers if leaf.shape is not None for kind in leaf.attentions]
    return ModelProfile(
        shapes=tuple(leaf.shape for leaf in layers),
        batching=batching,
        states=StateProfile.of(states, diverts_states),
        attentions=tuple(dict.fromkeys(kinds)),
        chunk_attentions=tuple(
            kind for own, leaf in recorded for kind in leaf.attentions or own.found
        ),
        sees=tuple(widest(s for r in pair for s in r.seen or [FULL]) for pair in recorded),
        last_layer_narrows=batching is Batching.MIXED and _narrows(model, states),
        embedding_rows=embedding_rows,
        logit_columns=logit_columns,
        heads_take_rows=_heads_take_rows(model, batched=batching is not Batching.SINGLE),
        decodes_gather=any(not leaf.attentions for leaf in decode or () if leaf.shape is not None),
    )


def _recorders(caches: Sequence[Any]) -> list[_Recorder]:
    return [leaf for leaf in leaves(caches) if isinstance(leaf, _Recorder)]


def _watched(caches: Sequence[Any]) -> list[WatchedStates]:
    return [leaf for leaf in leaves(caches) if isinstance(leaf, WatchedStates)]


def model_type(model: nn.Module) -> str:
    """mlx-lm's name of the architecture."""
    return str(getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1]))


def _trace(model: nn.Module, rows: int, length: int) -> list[Any]:
    """Build the graph of one forward on recording caches; return the caches."""
    caches = _recording_caches(model, rows)
    try:
        with attention_hook():
            logits = model(mx.zeros((rows, length), mx.int32), cache=caches)
    except UnknownAttentionError as error:
        raise UnsupportedModelError(f"model type {model_type(model)} is refused: {error}") from None
    if not isinstance(logits, mx.array):
        raise UnsupportedModelError(
            f"model type {model_type(model)} is refused: it returns {type(logits).__name__}, not "
            "logits as mlx-lm's models"
        )
    return caches


def _recording_caches(model: nn.Module, rows: int) -> list[Any]:
    return [
        _convert(cache, lambda sees: _Recorder(rows, sees), WatchedStates.of)
        for cache in make_prompt_cache(model)
    ]


def _diverts_states(model: nn.Module, states: Sequence[WatchedStates]) -> bool:
    """Whether the modules that use the model's `states` can compute rows of many sequences."""
    rows, users = RecurrentRows.of(model), [user for leaf in states for user in leaf.users]
    rows.divert([user for user in users if user is not None])
    caches = _recording_caches(model, TRACE_ROWS)
    watched = _watched(caches)
    runs, first = list[Run](), 0
    for count, stops in ((2, [1]), (1, [2, 3]), (2, [3])):
        own = [empty_like(leaf) for leaf in watched]
        runs.append(Run(first, count, stops, own))
        first = runs[-1].stop
    assert first == TRACE_ROWS
    try:
        with attention_hook(), rows.computing(runs, watched):
            logits = model(mx.zeros((TRACE_ROWS, 1), mx.int32), cache=caches)
    except Exception:  # whatever a model raises that expects the tokens of a sequence in a row
        return False
    return logits.shape[:2] == (TRACE_ROWS, 1) and not any(leaf.users for leaf in watched)


def _narrows(model: nn.Module, states: Sequence[WatchedStates]) -> bool:
    """Whether the model's last layer and its head can compute some of a batch's rows."""
    *_, last_layer = getattr(model, "layers", None) or [None]
    last = set() if last_layer is None else {id(module) for module in last_layer.modules()}
    if any(id(user) in last for leaf in states for user in leaf.users):
        return False
    caches = _recording_caches(model, TRACE_ROWS)
    recorders = _recorders(caches)
    written: list[int] = []  # layers that had stored K/V when a layer was narrowed

    def narrow() -> None:
        written.append(sum(recorder.shape is not None for recorder in recorders))
        for recorder in recorders:
            recorder.narrow(len(SAMPLED_ROWS))

    rows = LogitRows.of(model).only(mx.array(SAMPLED_ROWS), 0)
    narrowed = LastLayer.of(model).narrowed(TRACE_ROWS, lambda: None, narrow)
    try:
        with attention_hook(), rows, narrowed:
            model(mx.zeros((TRACE_ROWS, 1), mx.int32), cache=caches)
    except (ValueError, TypeError):
        return False
    return written[-1:] == [sum(recorder.shape is not None for recorder in recorders)]


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Rows of the embedding and columns of the logits. If token ids come to no embedding, as many
    rows as columns."""
    ids = mx.array([[1, 0]])
    with attention_hook(), _lookups(model) as lookups:
        columns = int(model(ids, cache=_recording_caches(model, 1)).shape[-1])
    direct = [size for size, given in lookups if given is ids]
    sizes = direct or [size for size, given in lookups if given.flatten().tolist() == [1, 0]]
    return min(sizes, default=columns), columns


@contextmanager
def _lookups(model: nn.Module) -> Iterator[list[tuple[int, mx.array]]]:
    """Within this context: rows of each embedding that is called, and the ids that it is given."""
    found: list[tuple[int, mx.array]] = []
    kinds = [
        (module, type(module))
        for _, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    ]
    for module, kind in kinds:

        def watched(self: nn.Module, ids: mx.array, kind: Any = kind) -> mx.array:
            found.append((self["weight"].shape[0], ids))
            made: mx.array = kind.__call__(self, ids)
            return made

        module.__class__ = type(kind.__name__, (kind,), {"__call__": watched})
    try:
        yield found
    finally:
        for module, kind in kinds:
            module.__class__ = kind


def _heads_take_rows(model: nn.Module, batched: bool) -> bool:
    """Whether the model's output projection can compute some rows of a chunk and, if `batched`, of
    a batch. A module that wraps the projection may add what belongs to all rows."""
    layouts = [(1, TRACE_ROWS, 1), (TRACE_ROWS, 1, 0)]
    for rows, length, axis in layouts if batched else layouts[:1]:
        caches = _recording_caches(model, rows)
        try:
            with attention_hook(), LogitRows.of(model).only(mx.array(SAMPLED_ROWS), axis):
                logits = model(mx.zeros((rows, length), mx.int32), cache=caches)
        except Exception:  # whatever a model raises of shapes that do not fit
            return False
        if logits.shape[axis] != len(SAMPLED_ROWS):
            return False
    return True


def make_caches(model: nn.Module, pool: KVPool, places: Sequence[LayerPlace | None]) -> list[Any]:
    """The model's cache list with every K/V leaf replaced by a layer of the pool."""
    of_leaves = iter(places)
    return [
        _convert(cache, lambda sees: PagedLayerCache(pool, next(of_leaves), sees))
        for cache in make_prompt_cache(model)
    ]


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches of single layers, also those within lists of caches."""
    for cache in caches:
        if isinstance(cache, stock.CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def _convert(cache: Any, make: Any, make_states: Any = None) -> Any:
    """`cache` with each K/V leaf replaced by ``make(sees)``, and recurrent states, if asked for,
    by ``make_states(states)``."""
    kind = getattr(cache, "stock_class", type(cache))  # under the patch, a paged one
    if kind is stock.CacheList:
        return stock.CacheList(*(_convert(c, make, make_states) for c in cache.caches))
    if kind is stock.ArraysCache:
        return cache if make_states is None else make_states(cache)
    if kind in (stock.KVCache, stock.ConcatenateKVCache, stock.ChunkedKVCache):
        return make(FULL)
    if kind is stock.RotatingKVCache and cache.keep == 0:
        return make(causal(cache.max_size))
    name = f"{kind.__name__}(keep={cache.keep})" if hasattr(cache, "keep") else kind.__name__
    raise UnsupportedModelError(f"cache class {name} cannot be paged")
