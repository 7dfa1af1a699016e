"""Traces of what really runs: every eval's graph, as MLX's Metal backend would encode it."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary, WeakValueDictionary

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_paged import ops
from mlx_paged.attention.paths import FEW_QUERIES
from mlx_paged.drop_in import padded_batch
from mlx_paged.kv.pool import KVPool
from mlx_paged.runner import compiled_decode, layer_cache
from mlx_paged.runner.compiled_decode import CompiledDecode
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.scheduler.step import Step
from tests.gpu_order.model.graph import Graph, Node
from tests.gpu_order.model.graph_ops import GraphOps, address_of
from tests.gpu_order.model.pool_ops import ROLES, Blocks, Call, blocks_of_a_decode, recording
from tests.gpu_order.model.trace import Eval, Event, Free, HostWait, Synchronize

CALLS_KEPT = 30
"""Evals after which a lazy read is forgotten: most gathers are never evaluated."""


@dataclass(frozen=True)
class _Arguments:
    """What a compiled graph was given: they stay alive until its step is evaluated."""

    arrays: dict[str, mx.array]  # by name, those of the batch and the pool's handles
    has_scales: bool
    window_of: dict[str, int | None]  # by the name of a block table


class Tracer:
    """Records what happens to MLX while it is installed.

    Args:
        sink: takes the events, one by one.
        pool_elements: of each array of a pool; None: what it really has.

    Attributes:
        counts: pool ops by primitive, evals, and steps of compiled graphs.
        pools: by address, a name for the memory of each array of a pool.
        known: arrays whose memory the trace knows already.
    """

    def __init__(self, sink: Callable[[Event], None], pool_elements: int | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.pools: dict[int, str] = {}
        self.known: set[str] = set()
        self._sink = sink
        self._pool_elements = pool_elements
        self._calls: list[Call] = []
        self._names: WeakValueDictionary[str, mx.array] = WeakValueDictionary()
        self._ids: dict[int, str] = {}
        self._streams: list[mx.Stream] = []
        self._label = ""
        self._windows: WeakKeyDictionary[CompiledDecode, list[int | None]] = WeakKeyDictionary()
        self._arguments: deque[_Arguments] = deque(maxlen=CALLS_KEPT)
        self._num_names = self._num_steps = self._num_pools = 0

    def know(self, *arrays: mx.array) -> None:
        """Recognise these arrays when they return in a later eval."""
        for array in arrays:
            self._name(array)

    @contextmanager
    def installed(self, few_queries: int = FEW_QUERIES) -> Iterator["Tracer"]:
        """Record everything within this context, on the attention paths that a GPU takes.

        Args:
            few_queries: longer chunks are gathered.
        """
        with ExitStack() as stack:
            for name, function in recording(self._record).items():
                stack.enter_context(patch.object(ops, name, function))
            for module in (layer_cache, padded_batch):
                path = patch.object(module, "max_paged_queries", lambda: few_queries)
                stack.enter_context(path)
            stack.enter_context(patch.object(compiled_decode, "groups_nodes", lambda: False))
            self._patch(stack, KVPool, "__init__", self._pool_made)
            self._patch(stack, KVPool, "grow", self._pool_made)
            self._patch(stack, KVPool, "keep", self._pool_made)
            self._patch(stack, ModelRunner, "launch", self._launched)
            self._patch(stack, CompiledDecode, "__init__", self._made_compiled)
            self._patch(stack, CompiledDecode, "_run", self._run_compiled)
            self._patch(stack, mx.array, "item", self._read)
            self._patch(stack, mx.array, "tolist", self._read)
            self._patch(stack, mx, "eval", lambda call, *args: self._eval(call, args, True))
            self._patch(stack, mx, "async_eval", lambda call, *args: self._eval(call, args, False))
            self._patch(stack, mx, "synchronize", self._synchronized)
            yield self

    @staticmethod
    def _patch(stack: ExitStack, holder: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(holder, name)

        def patched(*args: Any, **options: Any) -> Any:
            return around(original, *args, **options)

        setattr(holder, name, patched)
        stack.callback(setattr, holder, name, original)

    # What is recorded

    def _record(
        self,
        primitive: str,
        out: Any,
        pools: tuple[mx.array, ...],
        blocks: Callable[[], Blocks],
        scales: tuple[int, ...] = (),
    ) -> None:
        outputs = tuple(out) if isinstance(out, tuple | list) else (out,)
        self._calls.append(
            Call(primitive, outputs, pools, blocks, self.stream(), self.counts["evals"], scales)
        )

    def _pool_made(self, call: Callable[..., None], pool: KVPool, *args: Any, **kw: Any) -> None:
        call(pool, *args, **kw)
        self._num_pools += 1
        for array in pool.handles():
            address = address_of(array)
            self.pools[address] = f"pool {self._num_pools} at {address:x}"

    def _made_compiled(
        self, call: Callable[..., None], compiled: CompiledDecode, *args: Any, **kw: Any
    ) -> None:
        call(compiled, *args, **kw)
        groups = args[2].groups
        self._windows[compiled] = [g.window for g in groups for _ in range(g.members)]

    def _run_compiled(
        self, call: Callable[..., Any], compiled: CompiledDecode, arrays: list[mx.array]
    ) -> Any:
        """Build a step from a compiled graph. No Python runs for its pool ops: they are found in
        the graph by the arrays that they are given."""
        pool, num_calls = compiled._pool, len(self._calls)
        handles = pool.handles()
        self.know(*arrays, *handles)
        found = call(compiled, arrays)
        del self._calls[num_calls:]  # of a trace, whose arrays have no values
        windows = zip(arrays[4::3], self._windows[compiled], strict=True)
        window_of = {self._name(tables): window for tables, window in windows}
        known = {self._name(array): array for array in (*arrays, *handles)}
        self._arguments.append(_Arguments(known, bool(pool.scales), window_of))
        self.counts["compiled steps"] += 1
        return found

    def _compiled_call(self, graph: Graph, node: Node) -> Call:
        """A pool op of a compiled decode, known by the arguments of its graph."""
        places = (2, 4) if node.primitive == "WriteKV" else (1, 3, 4)
        for given in reversed(self._arguments):
            names = [graph.origin(node.inputs[place], given.arrays) for place in places]
            if None not in names:
                break
        cache, *indices = (given.arrays[name] for name in names)
        blocks = blocks_of_a_decode(cache, indices, given.window_of.get(names[1]))
        scales = (-2, -1) if given.has_scales else ()
        before = self.counts["evals"]
        return Call(node.primitive, (), (cache,), blocks, self.stream(), before, scales)

    def _launched(self, call: Callable[..., Any], runner: Any, step: Step, before: Any) -> Any:
        self._num_steps += 1
        spans = [f"{s.request.id}[{s.start}:{s.stop})" for s in step.spans]
        copies = f", copies {[(c.src, c.dst) for c in step.copies]}" if step.copies else ""
        self._label = f" of step {self._num_steps} (spans {' '.join(spans)}{copies})"
        return call(runner, step, before)

    def _read(self, call: Callable[..., Any], array: mx.array, *args: Any) -> Any:
        value = call(array, *args)
        if id(array) in self._ids:
            self._sink(HostWait(self._ids[id(array)]))
        return value

    def _synchronized(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)
        self._sink(Synchronize(self.stream(*args)))

    def _eval(self, call: Callable[..., None], args: tuple[Any, ...], waits: bool) -> None:
        arrays = [a for _, a in tree_flatten(list(args)) if isinstance(a, mx.array)]
        graph, order = self._graph(arrays)
        placed = self._placed_calls(graph, order)
        call(*args)  # first: the blocks of a call may be known only now
        if order:
            self.counts["evals"] += 1
            traced = GraphOps(self, graph, placed)
            label = f"eval {self.counts['evals']}{self._label}"
            self._sink(Eval(tuple(traced.ops(order)), label, waits))
            for node in order:
                for name in node.outputs:
                    if name not in self._names:
                        self._sink(Free(self.full_name(name)))
        elif waits:
            for array in arrays:
                self._sink(HostWait(self._name(array)))
        oldest = self.counts["evals"] - CALLS_KEPT
        done = set(placed.values())
        self._calls = [
            c for c in self._calls if c not in done and (c.writes or c.made_before >= oldest)
        ]

    def _graph(self, arrays: Sequence[mx.array]) -> tuple[Graph, list[Node]]:
        outputs = [self._name(array) for array in arrays]
        for known in self._calls:
            self.know(*known.outputs, *known.pools)
        graph = Graph(arrays, dict(self._names))
        return graph, graph.evaluation_order(outputs)

    def _placed_calls(self, graph: Graph, order: Sequence[Node]) -> dict[Node, Call]:
        """The calls that this eval evaluates, by node; the graph has others, too."""
        placed, evaluated = {}, set(order)
        for known in self._calls:
            node = known.node_in(graph, self._name(known.outputs[0]))
            if node in evaluated:
                placed[node] = known
        for node in order:
            if node.primitive in ROLES and node not in placed:
                placed[node] = self._compiled_call(graph, node)
        return placed

    # Names

    def _name(self, array: mx.array) -> str:
        """The name of an array. Arrays of a pool that are views of one memory have one name."""
        name = self._ids.get(id(array))
        if name is None or self._names.get(name) is not array:
            self._num_names += 1
            name = self._ids[id(array)] = f"a{self._num_names}"
            self._names[name] = array
        return name

    def full_name(self, name: str) -> str:
        """A name in a graph as one that no other eval has."""
        return name if name in self._names else f"{name} of eval {self.counts['evals']}"

    def array(self, name: str) -> mx.array | None:
        """The array of this name, if it has one of the tracer's names and still exists."""
        return self._names.get(name)

    def elements(self, call: Call) -> int:
        """How many elements MLX counts if it binds one of the pool's arrays of a call."""
        if self._pool_elements is not None:
            return self._pool_elements
        return max((array.size for array in call.pools), default=0)

    def stream(self, stream: mx.Stream | None = None) -> int:
        """A number for a stream; default the present one."""
        stream = stream or mx.default_stream(mx.default_device())
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)
