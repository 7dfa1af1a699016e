"""One step on the model: lay out the batch, bind the caches, run the model, sample."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import ops
from mlx_paged.attention.forward import Forward
from mlx_paged.attention.sdpa_hook import attention_hook
from mlx_paged.attention.shared_prefixes import MakePrefixes, shared_in
from mlx_paged.holdings import Holding
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_bytes import bytes_of, load_blocks, read_blocks
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv.layer_groups import LayerPlace
from mlx_paged.kv.pool import KVPool
from mlx_paged.metrics.stats import Traces
from mlx_paged.ops.cpu_layers import CPULayers
from mlx_paged.runner.batch import Batch, BatchTables, Layout, SampledRows, joined
from mlx_paged.runner.buckets import Buckets
from mlx_paged.runner.compiled_decode import CompiledDecode, weakly, why_untraceable
from mlx_paged.runner.device_errors import (
    note_errors_on,
    noted,
    raise_noted,
    telling,
    telling_errors,
    waiting,
)
from mlx_paged.runner.hidden_states import HiddenStates
from mlx_paged.runner.hosted_model import HostedModel
from mlx_paged.runner.launched_step import HeldBack, LaunchedStep, Part
from mlx_paged.runner.layer_cache import PagedLayerCache, kept_handle
from mlx_paged.runner.model_probe import Batching, ModelProfile, leaves, make_caches
from mlx_paged.runner.row_terms import MakeTerms, narrow, using
from mlx_paged.runner.skip_unsampled import WORTH_SKIPPING, LastLayer, LogitRows, lock_of
from mlx_paged.runner.thread_graphs import free_graphs_with_thread, of_thread
from mlx_paged.sampling.prompt_scores import PromptScores
from mlx_paged.sampling.sampler import PendingTokens, Sampler, Scores, on_host, outside_rows
from mlx_paged.scheduler.step import SampledToken, Span, Step, StepReport, UnknownEndError


class ModelRunner:
    """Runs steps on an mlx-lm model whose K/V lives in `pool`.

    Args:
        places: where the K/V of each of the model's layers is in the pool.
        cpu_linear: whether linear layers on a CPU are this package's; None: the default.
        make_prefixes: makes what finds sequences that begin with the same blocks; None: by
            :func:`shared_in` of the pool.
        begins_each: begin each forward before the next one is built. All ranks then compute
            collective operations in the same order.
        reads_states: hidden states of the model that its steps give a head; see ``Head.states``.
        make_sampler: makes the sampler, also after a failure.

    Attributes:
        compiled: computes the steps that only decode; None: as all other steps.
        why_plain: why it is None.
        row_terms: makes what layers add for the rows of a batch; None: nothing for any batch.
        error: that was noted, until recovery; the steps under way may be wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        profile: ModelProfile,
        places: Sequence[LayerPlace | None],
        allocator: BlockAllocator,
        pool: KVPool,
        *,
        cpu_linear: bool | None = None,
        make_prefixes: MakePrefixes | None = None,
        begins_each: bool = False,
        reads_states: Sequence[int] = (),
        make_sampler: Callable[[], Sampler] = Sampler,
    ) -> None:
        self.model, self._lock = model, lock_of(model)
        self._hook = attention_hook()
        self._hosted = model if isinstance(model, HostedModel) else None
        self.allocator = allocator
        self.pool = pool
        self.batching = profile.batching
        self.caches = make_caches(model, pool, places)
        flat = list(leaves(self.caches))
        self.layers = [c for c in flat if isinstance(c, PagedLayerCache)]
        self._second_layer = next((c for c in flat[1:2] if isinstance(c, PagedLayerCache)), None)
        self.states = profile.states.on(model, flat)
        self._second_states = self.states.layers_of(flat[1:2])
        self.logit_rows = LogitRows.of(model)
        self._heads_take_rows = profile.heads_take_rows
        self._embedding_rows = profile.embedding_rows
        self._hidden = HiddenStates(model, reads_states)
        self.last_layer = LastLayer.of(model) if self._hidden.narrows(profile) else None
        with self._lock:
            self.cpu_layers = CPULayers(model, cpu_linear)
        self.begins_each = begins_each
        self._make_sampler = make_sampler
        self.sampler = make_sampler()
        self._held_back: LaunchedStep | None = None
        self._loaded: list[mx.array] = []  # what transfers read from, until the next step is read
        self.error: Exception | None = None
        note_errors_on(self)
        self.compiled: CompiledDecode | None = None
        self.row_terms: MakeTerms | None = None
        self.why_plain = self._untraceable = why_untraceable(profile)
        prefixes = make_prefixes or shared_in(pool)
        self._new_tables = partial(BatchTables.of_groups, allocator, make_prefixes=prefixes)
        self._tables = self._new_tables()

    @property
    def reports(self) -> dict[str, Any]:
        """What the runner reports in an engine's statistics, by the field's name."""
        return {"traces": None if self.compiled is None else self.compiled.traces}

    def holdings(self) -> list[Holding]:
        """What the graphs take of the memory."""
        return [] if self.compiled is None else self.compiled.holdings()

    def compile_decodes(self, wanted: bool | None, max_rows: int) -> Traces | None:
        """Compute decodes by compiled graphs from now on, if `wanted` (None: if these take less
        time) and if they are right. Return what is traced. No block may be in use."""
        self.why_plain = "not asked for" if wanted is False else self._untraceable
        if self.why_plain is not None:
            return None
        buckets = Buckets.of_device(self.allocator.block_size)
        parts = self.allocator, self.pool, self.states, self._hidden, max_rows, buckets
        compiled = CompiledDecode(self.model, weakly(self._graph), *parts)
        self.why_plain = compiled.problem(if_faster=wanted is None)
        self.states.clear()
        if self.why_plain is None:
            self.compiled, self._tables = compiled, self._new_tables(buckets=buckets)
        return compiled.traces if self.why_plain is None else None

    def warm_up(self) -> None:
        """Trace the decodes that are compiled, for this thread alone."""
        if self.compiled is not None:
            self.compiled.trace()

    @property
    def _extra_seconds(self) -> float:
        """The seconds so far of launches that were not the model's forwards."""
        traced = 0.0 if self.compiled is None else self.compiled.traces.seconds
        hosted = 0.0 if self._hosted is None else self._hosted.extra_seconds
        return traced + hosted

    def launch(self, step: Step, before: LaunchedStep | None) -> LaunchedStep:
        """Build a step's graph and start it on the device, without waiting for it."""
        try:
            return self._launch(step, before)
        except Exception as error:
            raise_noted(error)

    def _launch(self, step: Step, before: LaunchedStep | None) -> LaunchedStep:
        if not hasattr(of_thread, "end"):
            free_graphs_with_thread()
        for earlier in (self._held_back, before):
            if earlier is not None:
                self.go_on(earlier)
        if not self.pool.changes_in_place:
            self.pool.settle()
        if step.copies:
            self.pool.copy_blocks(step.copies)
        launched = LaunchedStep(StepReport(step), [], None)
        if step.is_held_back:
            launched.held = HeldBack(threading.get_ident())
        traced = self._extra_seconds
        first = self._build(step, None if before is None else before.coming, launched)
        launched.report.extra_seconds = self._extra_seconds - traced
        if launched.unsampled is not None:
            if any([request.constraint is not None for request in launched.requests]):
                launched.pending.append(launched.unsampled[0])
                if launched.held is None:
                    self._begin(launched.pending)  # the device computes while masks are made
            self._sample(launched)
        if launched.held is None:
            self._begin_last(launched)
        else:
            self._held_back = launched
            self._begin(first)
        if self.error is not None:
            raise self.error
        return launched

    def _build(
        self, step: Step, coming: PendingTokens | None, launched: LaunchedStep
    ) -> list[mx.array]:
        """Build the forwards of a step; return the arrays with which a step that is held back
        begins. The device computes them while the tokens of the step before are returned."""
        sampled: list[SampledRows] = []
        first: list[mx.array] | None = None
        scores: Scores | None = None
        batches = self._batches(step, coming)
        if len(batches) > 1 and self.row_terms is not None:
            self.row_terms.bring(step.spans)
        for batch in batches:
            launched.report.figures.update(batch.figures)
            if launched.held is None:
                rows, scores = self._forward(batch)
            else:
                rows, scores, early = self._forward_and_first(batch)
                first = early if first is None else first
            launched.hidden += self._hidden.left_by(batch) if self._hidden.wanted else []
            own = rows if batch.logits_of is None else rows[batch.logits_of]
            waits = not self.pool.in_place and batch is not batches[-1]
            if self.begins_each or batch.scored or waits:
                states = self.states.left_by(batch.spans)
                read = [own] * bool(batch.sampled) + [rows] * bool(batch.scored)
                part = Part([*self.pool.handles(), *states, *read], batch.scored, rows)
                self._compute(launched, part)
                if waits:  # what is under way holds the arrays that the next forward writes to
                    self.pool.settle(part.arrays)
                del part
            if batch.sampled:
                launched.requests += batch.sampled
                sampled.append((own, batch.newest, batch.sampled_lengths))
        launched.pending, self._loaded = self.pool.handles() + self._loaded, []
        for hidden in launched.hidden:
            launched.pending += hidden.arrays
        if self.states.exist:
            self.states.release(step.released)
            self.states.rest(step.rested)
            launched.pending += self.states.separate(step.spans) + self.states.left_by(step.spans)
        if sampled:
            logits, newest, lengths = sampled[0] if len(sampled) == 1 else joined(sampled)
            guesses = dict[int, list[int]]()
            for span in step.spans if not step.is_plain else ():
                if span.samples > 1:
                    guesses[span.request.id] = span.known[1 - span.samples :]
            launched.unsampled = logits, launched.requests, newest, lengths, scores, guesses
        return first or []

    def _forward_and_first(self, batch: Batch) -> tuple[mx.array, Scores | None, list[mx.array]]:
        """:meth:`_forward` of a step that is held back, and the arrays with which it may begin: all
        of a decode, which is short, or of a chunk one layer and the K/V or states of the next."""
        if batch.decodes_only:
            rows, scores = self._forward(batch)
            return rows, scores, [*self.pool.handles(), *self.states.left_by(batch.spans), rows]
        with kept_handle(self._second_layer) as handles:
            rows, scores = self._forward(batch)
        return rows, scores, handles + self.states.left_by(batch.spans, self._second_states)

    def _compute(self, launched: LaunchedStep, part: Part) -> None:
        """Begin a part of a step, and score prompt tokens, unless the step is held back."""
        if launched.held is not None:
            launched.held.parts.append(part)
            return
        self._begin(part.arrays)
        if part.scored:
            launched.scores.append(PromptScores(part.scored, part.logits))

    def transfer(
        self, stores: Sequence[BlockTransfer], loads: Sequence[BlockTransfer]
    ) -> Callable[[], None] | None:
        """Start to copy blocks out of the pool, then blocks into the pool: groups share arrays."""
        try:
            self._transfer(stores, loads)
            end = ops.metal.end_of_work() if stores else None
        except Exception as error:  # perhaps of the step under way; see `_begin`
            self.error = error
            raise_noted(error)
        return None if end is None else waiting(self, end)

    def _transfer(self, stores: Sequence[BlockTransfer], loads: Sequence[BlockTransfer]) -> None:
        if self._held_back is not None:  # it reads what is there before
            self.go_on(self._held_back)
        pool, groups = self.pool, range(len(self.allocator.groups))
        for group in groups:
            leaving = [t for t in stores if t.group == group and t.blocks]
            if leaving:
                staged = read_blocks(pool, [b for t in leaving for b in t.blocks], group)
                for i, stored in enumerate(leaving):
                    size = len(stored.blocks)
                    stored.payload = telling(bytes_of, staged, i * size, size)
        for group in groups:
            load_blocks(pool, group, [t for t in loads if t.group == group and t.blocks])
        self._loaded += [t.payload[0] for t in loads if isinstance(t.payload[0], mx.array)][:1]
        for each in [t for t in stores if t.state]:
            copied, read = self.states.copied_out(each.state)
            self._begin(copied)  # else the copy waits for the step that follows
            each.payload = telling(read)
        for each in [t for t in loads if t.state]:
            rows, row = each.payload
            loaded = self.states.put_back(each.state, np.asarray(rows)[row].tobytes())
            self._begin(loaded)  # another thread may compute the step that reads them

    def collect(self, launched: LaunchedStep) -> list[SampledToken]:
        """Wait for a step and read its tokens."""
        if self.error is not None:
            raise self.error
        try:
            self.go_on(launched)
            mx.eval(launched.pending)
            if launched.end is not None:
                launched.end()
            launched.pending = []
        except Exception as error:
            raise_noted(error)
        if self.error is not None:  # meanwhile another call was told of an error of the device
            raise self.error
        for scores in launched.scores:
            scores.deliver()
        if launched.sampled is None:
            return []
        columns = launched.requests, *on_host(launched.sampled)
        errors = launched.errors
        if launched.sampled.chosen is not None:
            errors = outside_rows(launched.sampled, columns[1]) | errors
        return list(map(SampledToken, *columns, map(errors.get, range(len(columns[0])))))

    def go_on(self, launched: LaunchedStep) -> None:
        """Begin all of a step that is held back. Choose the tokens of a step whose sampler waits
        until the step before has been read."""
        if launched.held is not None:
            self._let_go(launched, launched.held)
        if launched.unsampled is not None and self._sample(launched):
            self._begin_last(launched)  # before the step that follows it

    def _let_go(self, launched: LaunchedStep, held: HeldBack) -> None:
        if held.thread != threading.get_ident():
            raise UnknownEndError("another thread built the step, and only it can begin the step")
        started, launched.held, self._held_back = time.perf_counter(), None, None
        try:
            while held.parts:
                self._compute(launched, held.parts.pop(0))
        except Exception as error:  # the other parts have not begun
            self.error = noted(error)
            raise
        self._begin_last(launched)
        launched.report.rest_seconds += time.perf_counter() - started
        if self.error is not None:
            raise self.error

    def _sample(self, launched: LaunchedStep) -> bool:
        """Choose a step's tokens, lazily; False if the sampler does not know enough yet."""
        assert launched.unsampled is not None
        sampled = self.sampler(*launched.unsampled)
        if sampled is None:
            return False
        if self._embedding_rows < sampled.distributions.shape[-1]:
            sampled = sampled.below(self._embedding_rows)
        launched.sampled = sampled
        launched.unsampled, launched.errors = None, sampled.errors
        launched.coming = PendingTokens(launched.requests, sampled.tokens)
        arrays = (sampled.tokens, sampled.logprobs, sampled.top_tokens, sampled.top_logprobs)
        launched.pending += [each for each in (*arrays, sampled.chosen) if each is not None]
        return True

    def release(self, state_ids: Sequence[int], rested: Sequence[int] = ()) -> None:
        """Forget states, and let others rest, while no step is planned that has not been launched.
        The states that are left get arrays of their own."""
        self.states.release(state_ids)
        self.states.rest(rested)
        separated = [] if self._held_back is not None else self.states.separate()
        if separated:  # a step that is held back would have to begin now
            self._begin(separated)

    def recover(self, error: BaseException | None = None) -> None:
        """Give up the steps under way: reset the pool's handles and forget every state."""
        try:
            mx.synchronize()
        except Exception as another:  # of another step under way
            noted(another)
        mx.clear_cache()  # memory may be short
        self.pool.reset_handles()
        self.states.clear()
        self._loaded, self._held_back, self.error = [], None, None
        self.sampler = self._make_sampler()
        self._forget_tables()

    def resize(self, num_blocks: int, kept: Int32Array | None = None) -> None:
        """Let the pool have `num_blocks`, while no step is under way. The blocks `kept`, or all
        blocks, are the first of them."""
        self._loaded = []
        with telling_errors():
            self.pool.grow(num_blocks) if kept is None else self.pool.keep(kept, num_blocks)
        self._forget_tables()
        self._forget_graphs()

    def renew(self, num_blocks: int) -> None:
        """Make a pool of `num_blocks` anew, whose size could not be changed; no block is held."""
        self.pool.renew(num_blocks)
        self.recover()
        self._forget_graphs()

    def forget_kept(self) -> bool:
        """Give up what the model only keeps for later; returns whether there was anything."""
        return self._hosted is not None and self._hosted.forget_kept()

    def _forget_tables(self) -> None:
        buckets = None if self.compiled is None else self.compiled.buckets
        self._tables = self._new_tables(buckets=buckets)

    def _forget_graphs(self) -> None:
        if self.compiled is not None:
            self.compiled.forget()

    def _begin(self, arrays: list[mx.array]) -> None:
        """Begin to evaluate arrays. MLX tells of an error of the device once, to whoever asks next;
        so it is noted: the steps under way may be wrong, and reading them would raise nothing."""
        try:
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        except Exception as error:
            self.error = noted(error)

    def _begin_last(self, launched: LaunchedStep) -> None:
        self._begin(launched.pending)
        launched.end = ops.metal.end_of_work()

    def _batches(self, step: Step, coming: PendingTokens | None) -> list[Batch]:
        """A step's forwards: one forward of rows for all tokens that may share it, and one for each
        other chunk. A chunk is cut at the states that it leaves."""
        make = partial(Batch, allocator=self.allocator, coming=coming, scores=step.scores)
        if self.batching is Batching.MIXED and step.spans:
            return [make(step.spans, tables=self._tables)]
        together, alone = self._shared_and_alone(step.spans)
        batches = [make(together, tables=self._tables)] if together else []
        return batches + [make([p], layout=Layout.CHUNK) for span in alone for p in span.pieces()]

    def _shared_and_alone(self, spans: Sequence[Span]) -> tuple[Sequence[Span], Sequence[Span]]:
        """Spans that may share a forward of rows, and spans that each need their own."""
        if self.batching is Batching.SINGLE:
            return (), spans
        decodes = [s for s in spans if s.start > 0 and (len(s) == 1 or s.samples > 1 or s.stored)]
        if self.states.exist and not self.states.takes_rows:
            alike = self.states.alike(span for span in decodes if len(span) == 1)
            decodes = [s for s in decodes if len(s) == 1 and s.request.id in alike]
        shared = {span.request.id for span in decodes}
        return decodes, [span for span in spans if span.request.id not in shared]

    def _narrowed(self, batch: Batch) -> AbstractContextManager[None]:
        """A context in which the last layer computes only the sampled rows."""
        assert self.last_layer is not None

        def store_only() -> None:
            for layer in self.layers:
                layer.store_only()

        def attend_only() -> None:
            forwards = batch.sampled_alone()
            narrow(batch.sampled_rows)
            for layer in self.layers:
                layer.attend_only(forwards[layer.place.table])

        return self.last_layer.narrowed(batch.num_tokens, store_only, attend_only)

    def _forward(self, batch: Batch) -> tuple[mx.array, Scores | None]:
        """Logits ``[R, vocab]`` of the batch's sampled rows, and what a graph says of them."""
        terms = None if self.row_terms is None else self.row_terms(batch)
        more = {} if self._hosted is None else self._hosted.arguments(batch)
        compiled, are_rows = self.compiled, batch.layout is Layout.ROWS
        takes = compiled is not None and not more and compiled.takes(batch)
        contexts: list[AbstractContextManager[Any]] = [] if terms is None else [using(terms)]
        if self.states.exist:
            of_batch = batch.spans, are_rows and not takes, batch.num_empty
            contexts.append(self.states.computing(*of_batch))
        if compiled is not None and takes:
            call = partial(compiled, batch, terms)
            scores: Scores = _within(contexts, call) if contexts else call()
            return scores.logits, scores
        axis, rows = 0 if are_rows else 1, None if batch.samples_all else batch.sampled_rows
        if rows is not None:
            contexts.append(self.logit_rows.only(rows, axis, by_heads=self._heads_take_rows))
            saves = 0 < batch.num_sampled_rows <= batch.num_tokens - WORTH_SKIPPING
            if saves and self.last_layer is not None:
                contexts.append(self._narrowed(batch))
        logits: mx.array = _within(contexts, self._graph, batch.inputs, batch.forwards, **more)
        if rows is not None and not self.logit_rows.were_taken:
            logits = mx.take(logits, rows, axis=axis)
        return logits.flatten(0, 1)[: batch.num_tokens if rows is None else None], None

    def _graph(self, inputs: mx.array, forwards: Sequence[Forward], **more: Any) -> mx.array:
        """The model's output for `inputs` on the caches of the groups' members."""
        for layer in self.layers:
            layer.bind(forwards[layer.place.table])
        layers = self.cpu_layers.diverted() if mx.default_device() == mx.cpu else self._lock
        hidden = self._hidden.forward() if self._hidden.wanted else self._lock
        with self._lock, self._hook, layers, hidden:  # to enter the lock again changes nothing
            logits: mx.array = self.model(inputs, cache=self.caches, **more)
        return logits


def _within(
    contexts: Sequence[AbstractContextManager[Any]],
    call: Callable[..., Any],
    *args: Any,
    **more: Any,
) -> Any:
    """What a call returns within these contexts, the first one around the others."""
    if not contexts:
        return call(*args, **more)
    with contexts[0]:
        return _within(contexts[1:], call, *args, **more)
