"""The forward of a step that only decodes, as one compiled graph."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import product
from statistics import median
from typing import Any, TypeVar
from weakref import WeakMethod

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from mlx_paged import ops
from mlx_paged.arguments import MAX_INT32
from mlx_paged.attention.forward import Chunk, Forward
from mlx_paged.attention.paths import max_paged_queries
from mlx_paged.holdings import CountedBy, Holding
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import ceil_div
from mlx_paged.kv.pool import KVPool
from mlx_paged.metrics.stats import Traces, resident_bytes
from mlx_paged.runner.batch import Batch, Layout, row_bucket
from mlx_paged.runner.buckets import Buckets
from mlx_paged.runner.hidden_states import HiddenStates
from mlx_paged.runner.layer_states import Forms, LayerStates, States
from mlx_paged.runner.lora_numbers import LoRANumbers
from mlx_paged.runner.model_probe import Batching, ModelProfile
from mlx_paged.runner.recorded_graph import groups_nodes, recorded_graph
from mlx_paged.runner.row_terms import RowTerms, using
from mlx_paged.runner.skip_unsampled import lock_of
from mlx_paged.runner.thread_graphs import free_graphs_with_thread
from mlx_paged.sampling.sampler import Scores

LOGGER = logging.getLogger(__name__)

PAIRS = 9  # of a plain and a compiled step that are timed, unless they take too long
MOST_SECONDS = 0.25  # no pair begins later after the first ones, in which a GPU compiles
USES = 3  # steps of one size before a graph for them is traced, if that is not done at the start
MOST_RAGGED_GRAPHS = 64
MOST_TRACE_SECONDS, MOST_TRACE_BYTES = 2.0, 2**28
"""What is spent at the start. Buckets that are not traced then are traced when they are used."""

Arrays = list[mx.array]
"""Of one forward: tokens, positions, context lengths; then slots, tables and shared prefixes of
each member of the layer groups; with several rows of a request `cu_seqlens`."""

Compute = Callable[[Arrays], Scores]
Results = tuple[Scores, Arrays, States, Arrays]
"""Scores, the pool's handles, states of sequences, and the hidden states that a head reads."""

Result = TypeVar("Result")


def weakly(method: Callable[..., Result]) -> Callable[..., Result]:
    """A function that calls a bound method and does not keep its object alive: without cycles a
    dropped engine frees its pool at once."""
    reference = WeakMethod(method)

    def call(*args: Any) -> Result:
        found = reference()
        assert found is not None
        return found(*args)

    return call


class _NotBuiltError(Exception):
    """A graph is to be traced, and the plain step has not been computed yet.

    The plain step traces the functions that the model itself compiles. If MLX traced one of these
    functions within the trace of the graph, the function would keep the shapes and the parameters
    of that trace.
    """


class _DisabledError(Exception):
    """The user disabled ``mx.compile``, so that it traces nothing."""


class _GathersError(Exception):
    """A layer of the graph gathers its K/V, which would have the length of the bucket's table. A
    graph of plain MLX, which has no other way, may."""


EXPECTED = _GathersError, _DisabledError
"""Why no graph was traced, where nothing is wrong."""


def why_untraceable(profile: ModelProfile) -> str | None:
    """Why no graph can compute the decodes of several buckets; None: nothing is known."""
    if profile.batching is Batching.SINGLE:
        return "each sequence has its own forward"
    return "gathered K/V has a length" if profile.decodes_gather else None


class CompiledDecode:
    """Builds the graph of a decode step from a graph that ``mx.compile`` traced before.

    The traced nodes are copied in C++ (:func:`mlx_paged.runner.recorded_graph.recorded_graph`); the
    model's Python code does not run. A graph has fixed shapes, so there is one for each bucket of
    rows and of columns of the block tables. Rows of padding have context length 0 and slot -1: they
    write nothing and attend to nothing. The pool's handles are arguments and results. The model's
    parameters are arguments, too: new values need no new trace, and new layers are traced again.
    The graphs belong to a stream, as all computations of MLX do, so that another thread's stream
    traces them again.

    A graph has the bits of the plain forward. Nothing is fused that the model does not compile
    itself, and what it compiles stays as it is.

    Args:
        model: its `state` is an argument of the graphs.
        compute: the logits ``[R, 1, vocab]`` of inputs ``[R, 1]`` and the forwards of all members.
        states: of layers that keep some beside K/V, no sequence has any yet.
        hidden: the hidden states that a head reads.
        max_rows: the most sequences of a step.
        buckets: of the tables' columns.

    Attributes:
        traces: how many there were, and what they cost.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: Callable[[mx.array, Sequence[Forward]], mx.array],
        allocator: BlockAllocator,
        pool: KVPool,
        states: LayerStates,
        hidden: HiddenStates,
        max_rows: int,
        buckets: Buckets,
    ) -> None:
        self.traces = Traces()
        self.buckets = buckets
        self._model = model
        self._lora = LoRANumbers(model)
        self._lock = lock_of(model)
        self._compute = compute
        self._pool = pool
        self._states = states
        self._has_states = states.exist
        self._hidden = hidden
        self._forms: Forms = ()  # of states that grow no more
        self._block_size = allocator.block_size
        groups = allocator.groups
        self._pieces = [group.pieces for group in groups for _ in range(group.members)]
        self._max_rows = max_rows
        room = pool.num_blocks // sum(group.width for group in groups)
        positions = getattr(getattr(model, "args", None), "max_position_embeddings", None)
        self._most_columns = min(room, ceil_div(positions or MAX_INT32, self._block_size))
        self._stream = mx.default_stream(mx.default_device())
        self._graphs: dict[tuple[int, ...], dict[Hashable, ops.Tape] | None] = {}
        self._is_built = False  # the step that is traced now
        self._terms: RowTerms | None = None  # of the latest batch
        self._takes_ragged = buckets.takes_ragged and pool.in_place and max_paged_queries() > 0
        self._gathered = False  # whether a layer of the last forward did
        self._unshared: dict[int, mx.array] = {}  # by rows: shared prefixes of no sequence
        self._uses = Counter[Hashable]()  # steps of a size
        self._is_lazy = False  # whether some buckets were not traced at the start
        self._ragged = set[int]()  # numbers of rows of such steps that have graphs

    def takes(self, batch: Batch) -> bool:
        """Whether a graph computes the batch. Each row chooses a token. The batch only decodes, and
        the states that it reads grow no more; or requests have several rows, the layers have no
        states, and no row is padding."""
        rows = len(batch.tokens)
        if not batch.samples_all or batch.layout is not Layout.ROWS:
            return False
        if batch.decodes_only:
            has_states = not self._forms or self._states.have(batch.spans, self._forms)
            return has_states and self._is_traced(batch)
        if self._forms or row_bucket(rows) != rows or not self._takes_ragged:
            return False
        self._uses[rows] += 1  # a trace takes as long as several plain graphs
        if self._uses[rows] >= USES and len(self._ragged) < MOST_RAGGED_GRAPHS:
            self._ragged.add(rows)
        return rows in self._ragged

    def _is_traced(self, batch: Batch) -> bool:
        """Whether there is a graph for the batch, it is to be traced at once, or its size has
        occurred often enough for one."""
        rows, shares = len(batch.tokens), False
        key = [rows, rows, rows]
        for forward in batch.forwards:
            tells = forward.shared_prefixes is not None
            shares |= tells
            sharing = rows if tells or self.buckets.always_shares else 0
            key += (rows, forward.block_tables.shape[1], sharing)
        if not self._is_lazy and (self.buckets.always_shares or not shares):
            return True
        size = tuple(key)
        if size in self._graphs:
            return True
        self._uses[size] += 1
        return self._uses[size] >= USES

    def __call__(self, batch: Batch, terms: RowTerms | None) -> Scores:
        """Logits ``[T, vocab]`` of a batch, whose layers add `terms`, and the most likely
        tokens."""
        self._terms = terms
        first, more = batch.forwards[0], (batch.num_tokens - len(batch.seq_ids), 0)
        lens, last = first.context_lens, list[mx.array]()
        if first.cu_seqlens is not None:  # as many sequences as rows: the first ones are empty
            lens, last = mx.pad(lens, more), [mx.pad(first.cu_seqlens, more)]
        arrays = [batch.tokens, first.positions, lens]
        for forward, pieces in zip(batch.forwards, self._pieces, strict=True):
            assert forward.slot_mapping is not None
            tables, prefixes = forward.block_tables, forward.shared_prefixes
            if prefixes is None:
                prefixes = self._no_prefixes(len(lens) - bool(last) * more[0])
            if last:
                columns = pieces * self.buckets.width(tables.shape[1] // pieces)
                tables = mx.pad(tables, [more, (0, columns - tables.shape[1])])
                prefixes = mx.pad(prefixes + mx.array([[more[0]], [0]]), [(0, 0), more])
            arrays += (forward.slot_mapping, tables, prefixes)
        scores = self._run(arrays + last)
        return Scores(*[each[: batch.num_tokens] for each in scores]) if batch.num_empty else scores

    def _no_prefixes(self, rows: int) -> mx.array:
        """Shared prefixes of no sequence: as an argument of a graph that has none, no number."""
        count = rows if self.buckets.always_shares else 0
        if count not in self._unshared:
            self._unshared[count] = mx.array(np.zeros((2, count), np.int32))
        return self._unshared[count]

    def trace(self) -> None:
        """Trace the buckets for the current stream, buckets of few rows first, until this has cost
        MOST_TRACE_SECONDS or MOST_TRACE_BYTES. Nothing is evaluated."""
        before, handles, states = resident_bytes(), self._pool.handles(), self._states.loaded
        self._terms = None
        seconds = self.traces.seconds
        rows = sorted(set(map(row_bucket, range(1, self._max_rows + 1))))
        widths = self.buckets.widths(self._most_columns)
        for count, width in product(rows, widths):
            is_costly = self.traces.seconds - seconds > MOST_TRACE_SECONDS
            if is_costly or resident_bytes() - before > MOST_TRACE_BYTES:
                self._is_lazy = True
                break
            self._states.load_zeros(self._forms, count)
            self._run(self._first_tokens(count, width))
            self._pool.replace_handles(handles)
        self._states.loaded = states
        self.traces.bytes = max(0, resident_bytes() - before)

    def holdings(self) -> list[Holding]:
        """The line of a ledger of memory."""
        return [Holding("traces", self.traces.bytes, counted_by=CountedBy.HEAP)]

    def forget(self) -> None:
        """The pool has other arrays: trace anew the sizes of steps that are used often."""
        self._graphs.clear()
        self._uses.clear()
        self._ragged.clear()
        self._is_lazy = True

    def problem(self, if_faster: bool) -> str | None:
        """Why steps should stay plain: MLX cannot trace one, or its results or K/V are not those of
        the plain forward; with `if_faster` also that it takes more time. None: they should not. The
        pool's first blocks must be free."""
        buckets, states = self.buckets, self._final_states()
        widths = buckets.widths(self._most_columns)
        narrow, wide = widths[0], [w for w in widths if w <= buckets.wide][-1]
        stop, ratio = 0.0, 0.0
        for width in sorted({narrow, wide}):
            for _ in range(2):  # the trace, and its graph
                stop = time.perf_counter() + MOST_SECONDS
                ratio, differs = self._pair(width, width, states)
                if (problem := self._no_graph()) is not None or differs:
                    return problem or "a compiled step has other bits"
        if not if_faster:
            return None
        ratios = [ratio]
        if wide != narrow:  # the plain step's table is as narrow as the context allows
            own = wide // 2 + 1
            self._pair(wide, own, states)  # compiles what the other table needs
            stop, ratios = time.perf_counter() + MOST_SECONDS, [self._pair(wide, own, states)[0]]
        else:
            own = wide
        while len(ratios) < PAIRS and time.perf_counter() < stop:
            ratios.append(self._pair(wide, own, states)[0])
        return "a compiled step takes more time" if median(ratios) >= 1 else None

    def _pair(self, width: int, own: int, states: States) -> tuple[float, bool]:
        """How many times a plain step of one token a compiled one takes; whether their bits differ.
        The compiled step's table has `width` blocks, of which the context fills more than half but
        in the narrowest bucket. The plain step's table has `own` blocks."""
        count = len(self._pieces)
        other = count if 2 * count <= self._pool.num_blocks else 0
        seconds, bits = list[float](), list[list[bytes]]()
        for run, columns, block in ((self._plain, own, 0), (self._run, width, other)):
            self._states.loaded = states
            before = 0 if width == self.buckets.width(1) else width // 2
            tokens = self._first_tokens(1, columns, block, before)
            one, found = self._one_token(run, tokens, block)
            seconds.append(one)
            bits.append(found)
        return seconds[1] / seconds[0], bits[0] != bits[1]

    def _no_graph(self) -> str | None:
        """Why a graph was not traced; None: all were."""
        if (
            self._gathered and self._pool.in_place
        ):  # a model's layers, or the GPU's compiler refuses a kernel
            return "gathered K/V has a length"
        is_traced = self.traces.count == len(self._graphs) and self._has_graphs
        return None if is_traced else "MLX cannot trace a step"

    @property
    def _has_graphs(self) -> bool:
        """Whether no trace has failed."""
        return None not in self._graphs.values()

    def _final_states(self) -> States:
        """The states of a sequence of tokens 1, as soon as their forms stay."""
        forms: Forms = ()
        tokens = self._first_tokens(1, self.buckets.width(1), 0)
        tokens[0] = tokens[0] + 1  # a lost state is noticed only if another token changes it
        while forms != (forms := self._states.loaded_forms):
            self._plain(tokens)
            mx.eval(self._pool.handles(), self._states.loaded)
        self._forms = forms
        return self._states.loaded

    def _run(self, arrays: Arrays) -> Scores:
        stream = mx.default_stream(mx.default_device())
        if stream != self._stream:
            self._stream = stream
            self._graphs.clear()
        key = tuple([array.shape[-1] for array in arrays])
        graphs = self._graphs.setdefault(key, {})
        if graphs is None:
            return self._plain(arrays)
        traces, pool = self.traces, self._pool
        count, started = traces.count, time.perf_counter()
        try:
            with self._lock:
                found = self._computed(graphs, arrays)
        except Exception as error:
            if self._has_graphs:
                is_known = len(self._graphs) == 1 or isinstance(error, EXPECTED)
                level = logging.INFO if is_known else logging.WARNING
                LOGGER.log(level, "MLX cannot trace a decode of %s rows", key[0], exc_info=True)
            self._graphs[key] = None
            return self._plain(arrays)
        finally:
            if traces.count != count:
                ops.set_fusion(True)
                traces.seconds += time.perf_counter() - started
        scores, handles, states, self._hidden.found = found
        if self._has_states:
            self._states.loaded = states
        pool.replace_handles(handles)
        return Scores(*scores)

    def _computed(self, graphs: dict[Hashable, ops.Tape], arrays: Arrays) -> Results:
        states = self._states.loaded if self._has_states else []
        terms = self._terms
        rows, form = ([], 0) if terms is None else (terms.arrays, terms.form)
        values, structure = ops.arrays_in(self._model.state)
        if structure != self._lora.absent_in:
            structure = self._lora.form(structure)
        others = arrays, self._pool.handles(), states, rows
        given, form_of_others = ops.arrays_in(others)
        given += values
        kind = structure, form, form_of_others
        found: Results | None = graphs[kind](given) if kind in graphs else None
        if found is None:
            graphs[kind] = self._recorded((*others, values), structure, form)
            found = graphs[kind](given)
        assert found is not None
        return found

    def _recorded(self, inputs: tuple[Any, ...], structure: int, form: int) -> ops.Tape:
        """The graph of a step, which is traced."""
        free_graphs_with_thread()
        arrays, handles, states, *_ = inputs
        try:
            return self._tape(inputs, structure, form)
        except _NotBuiltError:
            self._plain(arrays)
            self._pool.replace_handles(handles)
            self._states.loaded = states
        self._is_built = True
        try:
            return self._tape(inputs, structure, form)
        finally:
            self._is_built = False

    def _tape(self, inputs: tuple[Any, ...], *numbers: int) -> ops.Tape:
        """Each step evaluates its logits, which are the first result."""
        traced = mx.compile(weakly(self._traced))
        return recorded_graph(traced, inputs, *numbers, groups=groups_nodes())

    def _traced(
        self,
        arrays: Arrays,
        handles: Arrays,
        states: States,
        of_rows: Arrays,
        parameters: Arrays,
        *_: int,
    ) -> Results:
        """What the step leaves. ``mx.compile`` calls this once for each graph."""
        if ops.has_values(arrays[0]):
            raise _DisabledError
        if not self._is_built:
            raise _NotBuiltError
        self.traces.count += 1
        own_handles, own_states = self._pool.handles(), self._states.loaded
        self._states.loaded = states
        ops.keep_compiled(ops.arrays_in((arrays, handles, states, of_rows, parameters))[0])
        own_state = tree_map(lambda leaf: leaf, self._model.state)
        self._pool.replace_handles(handles)
        self._model.update(ops.with_arrays(self._model.state, parameters), strict=False)
        terms = self._terms
        try:
            with using(None if terms is None else terms.with_arrays(of_rows)):
                scores = self._plain(arrays)
            found = scores, self._pool.handles(), self._states.loaded, self._hidden.found
            if self._gathered and self._pool.in_place:
                raise _GathersError
        finally:
            self._pool.replace_handles(own_handles)
            self._states.loaded = own_states
            self._model.update(own_state, strict=False)
        ops.set_fusion(False)
        return found

    def _plain(self, arrays: Arrays) -> Scores:
        tokens, positions, context_lens, *of_members = arrays
        parts = 3 * len(self._pieces)
        slots, tables, prefixes = (of_members[first:parts:3] for first in range(3))
        sizes = [t.shape[1] // pieces for t, pieces in zip(tables, self._pieces, strict=True)]
        width, next_offset = min(sizes) * self._block_size, context_lens
        cu_seqlens, chunks = None, list[Chunk]()
        if len(of_members) > parts:
            next_offset, cu_seqlens = positions + 1, of_members[-1]
            # The lengths of the sequences are values of `cu_seqlens`, which a trace does not have.
            chunks = [Chunk(0, 0, 1, positions)] * len(tokens)
        forwards = [
            Forward(
                1,
                positions,
                slot,
                table,
                context_lens,
                width,
                positions,
                next_offset,
                cu_seqlens,
                chunks,
                shared_prefixes=shared if shared.size else None,
                is_traced=True,
            )
            for slot, table, shared in zip(slots, tables, prefixes, strict=True)
        ]
        logits = self._compute(tokens[:, None], forwards).flatten(0, 1)
        self._gathered = any([forward.gathers for forward in forwards])
        return Scores.of(logits)

    def _first_tokens(
        self, rows: int, columns: int, block: int | None = None, before: int = 0
    ) -> Arrays:
        """Token 0 in each row: the first one of a block, `block` for the first member; or padding.
        Layers may read what others of their group have stored, so each member has its own block,
        which is also each of the `before` blocks of the context before the token."""
        zeros = mx.zeros(rows, mx.int32)
        arrays = [zeros, zeros, zeros if block is None else zeros + before * self._block_size + 1]
        for member, pieces in enumerate(self._pieces):
            own = None if block is None else block + member
            slot = -1 if own is None else own * (self._block_size // pieces)
            tables = mx.full((rows, columns * pieces), own or 0, mx.int32)
            arrays += (zeros + slot, tables, self._no_prefixes(rows))
        return arrays

    def _one_token(self, run: Compute, tokens: Arrays, block: int) -> tuple[float, list[bytes]]:
        """Seconds of a step of one token, and the bits of its scores, its K/V and its states."""
        mx.eval(tokens)
        started = time.perf_counter()
        scores = run(tokens)
        states = self._states.loaded_arrays
        mx.eval(scores, self._pool.handles(), states)
        seconds = time.perf_counter() - started
        blocks = slice(block, block + len(self._pieces))
        stored = [handle[:, blocks, 0] for handle in self._pool.handles()]
        found = *scores, *stored, *map(mx.contiguous, states)
        return seconds, [ops.as_numpy(array.view(mx.uint8)).tobytes() for array in found]
