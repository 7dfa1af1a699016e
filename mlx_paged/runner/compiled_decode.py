"""The forward of a step that only decodes, as one compiled graph."""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import ops
from mlx_paged.attention.forward import Forward
from mlx_paged.kv.block_manager import KVBlockManager
from mlx_paged.metrics.stats import Traces, resident_bytes
from mlx_paged.runner.batch import FEWEST_COLUMNS, Batch, column_bucket, row_bucket

LOGGER = logging.getLogger(__name__)

PAIRS = 9
"""Pairs of a plain and a compiled step that are timed, unless they take too long."""

MOST_SECONDS = 0.25
"""No pair begins after this time."""

Run = Callable[[mx.array, Sequence[Forward]], mx.array]


class CompiledDecode:
    """Builds the graph of a decode step from a graph that ``mx.compile`` traced before.

    MLX copies the traced nodes in C++; the model's Python code does not run. A graph has fixed
    shapes, so there is one for each bucket of rows and of columns of the block tables. Rows of
    padding have context length 0 and slot -1: they write nothing and attend to nothing. The pool's
    handles are arguments and results. The model's parameters are arguments, too: new values need no
    new trace, and new layers are traced again. The graphs belong to a stream, as all computations
    of MLX do, so that another thread's stream traces them again.

    The elementwise ops of a graph are not fused, except those that the model fuses itself. So the
    logits are those of the plain forward, bit by bit, and a CPU needs no C++ compiler.

    Args:
        model: its `state` is an argument of the graphs.
        compute: the logits ``[R, 1, vocab]`` of inputs ``[R, 1]`` and the forwards of all members
            of the layer groups.

    Attributes:
        traces: how many there were, and what they cost.
    """

    def __init__(self, model: nn.Module, compute: Run, manager: KVBlockManager) -> None:
        self.model = model
        self.traces = Traces()
        self._compute = compute
        self._pool = manager.pool
        self._block_size = manager.allocator.block_size
        groups = manager.allocator.groups
        self._pieces = [group.pieces for group in groups for _ in range(group.members)]
        self._stream = mx.default_stream(mx.default_device())
        self._functions: dict[tuple[int, ...], Callable[..., list[mx.array]]] = {}

    def __call__(self, batch: Batch) -> mx.array:
        """Logits ``[T, vocab]`` of a batch that only decodes."""
        logits = self._run(batch.tokens, batch.forwards)
        return logits[: batch.num_tokens] if batch.padding else logits

    def trace(self, max_rows: int, max_columns: int) -> None:
        """Trace all buckets up to these sizes for the current stream. Nothing is evaluated."""
        before, handles = resident_bytes(), self._pool.handles()
        rows = sorted({row_bucket(count) for count in range(1, max_rows + 1)})
        widths = [FEWEST_COLUMNS]
        while widths[-1] < max_columns:
            widths.append(column_bucket(widths[-1] + 1))
        for count, width in product(rows, widths):
            self._run(*self._inputs(count, width))
            self._pool.replace_handles(handles)
        self.traces.bytes = resident_bytes() - before

    def is_right(self) -> bool:
        """Whether MLX can trace a step, and it has the logits and the K/V of the plain forward.
        The pool's first two blocks must be free."""
        last = min(1, self._pool.num_blocks - 1)
        try:
            _, plain = (self._one_token(self._plain, 0) for _ in range(2))
            _, compiled = (self._one_token(self._run, last) for _ in range(2))
        except Exception:
            LOGGER.info("decodes are not compiled: MLX cannot trace the model", exc_info=True)
            return False
        return self.traces.count == 1 and plain == compiled

    def pays(self) -> bool:
        """Whether steps of one row take less time than those of the plain forward, in turns."""
        started, seconds = time.perf_counter(), []
        while len(seconds) < PAIRS and (not seconds or time.perf_counter() - started < MOST_SECONDS):
            seconds.append([self._seconds(run) for run in (self._plain, self._run)])
        plain, compiled = (median(column) for column in zip(*seconds, strict=True))
        return compiled < plain

    def _run(self, tokens: mx.array, forwards: Sequence[Forward]) -> mx.array:
        stream = mx.default_stream(mx.default_device())
        if stream != self._stream:
            self._stream = stream
            self._functions.clear()
        key = len(tokens), *(forward.block_tables.shape[1] for forward in forwards)
        function = self._functions.get(key)
        if function is None:
            function = mx.compile(self._traced, inputs=[self.model.state])
            self._functions[key] = function
        arrays = [tokens, forwards[0].positions, forwards[0].context_lens]
        for forward in forwards:
            arrays += (forward.slot_mapping, forward.block_tables)
        traces, pool = self.traces, self._pool
        count, started = traces.count, time.perf_counter()
        try:
            logits, *handles = function(arrays, pool.handles())
        finally:
            if traces.count != count:
                ops.set_fusion(True)
                traces.seconds += time.perf_counter() - started
        pool.replace_handles(handles)
        return logits

    def _traced(self, arrays: list[mx.array], handles: list[mx.array]) -> list[mx.array]:
        """What ``mx.compile`` traces, with the arrays of :meth:`_forwards`. Where the user disabled
        it, every call of :meth:`_run` comes here with real arrays."""
        pool = self._pool
        is_trace, before = not ops.has_values(arrays[0]), pool.handles()
        self.traces.count += is_trace
        pool.replace_handles(handles)
        try:
            found = [self._plain(arrays[0], self._forwards(*arrays[1:])), *pool.handles()]
        finally:
            pool.replace_handles(before)
        if is_trace:  # functions that the model compiles have been traced
            ops.set_fusion(False)
        return found

    def _plain(self, tokens: mx.array, forwards: Sequence[Forward]) -> mx.array:
        return self._compute(tokens[:, None], forwards).flatten(0, 1)

    def _forwards(
        self, positions: mx.array, context_lens: mx.array, *slots_and_tables: mx.array
    ) -> list[Forward]:
        tables = slots_and_tables[1::2]
        entries = zip(tables, self._pieces, strict=True)
        width = min(table.shape[1] // pieces for table, pieces in entries)
        return [
            Forward(
                columns=1,
                positions=positions,
                slot_mapping=slots,
                block_tables=table,
                context_lens=context_lens,
                max_context=width * self._block_size,
                offset=positions,
                next_offset=context_lens,
                is_traced=True,
            )
            for slots, table in zip(slots_and_tables[::2], tables, strict=True)
        ]

    def _inputs(
        self, rows: int, columns: int, block: int | None = None
    ) -> tuple[mx.array, list[Forward]]:
        """Token 0 in each row: the first one of `block`, or padding."""
        zeros = mx.zeros(rows, mx.int32)
        arrays = [zeros, zeros if block is None else zeros + 1]
        for pieces in self._pieces:
            slot = -1 if block is None else block * self._block_size // pieces
            arrays.append(zeros + slot)
            arrays.append(mx.full((rows, columns * pieces), block or 0, mx.int32))
        return zeros, self._forwards(*arrays)

    def _one_token(self, run: Run, block: int) -> list[bytes]:
        """The logits of a sequence of one token, and its K/V, written to `block`."""
        logits = run(*self._inputs(1, FEWEST_COLUMNS, block))
        stored = [handle[:, block, 0] for handle in self._pool.handles()]
        return [bytes(memoryview(array.view(mx.uint8))) for array in (logits, *stored)]

    def _seconds(self, run: Run) -> float:
        started = time.perf_counter()
        logits = run(*self._inputs(1, FEWEST_COLUMNS, 0))
        mx.eval(logits, self._pool.handles())
        return time.perf_counter() - started
