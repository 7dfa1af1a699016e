"""A graph's nodes as ops of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from tests.gpu_order.model.graph import Graph, Node
from tests.gpu_order.model.pool_ops import ROLES, Call
from tests.gpu_order.model.trace import Access, Array, Binding, Op, Role

if TYPE_CHECKING:
    from tests.gpu_order.model.tracer import Tracer

VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "ExpandDims", "Flatten", "Reshape"),
    *("Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"),
}
"""Primitives whose outputs are views of their first input."""


class GraphOps:
    """The ops of one eval.

    Args:
        calls: of pool ops, by node.
    """

    def __init__(self, tracer: Tracer, graph: Graph, calls: Mapping[Node, Call]) -> None:
        self._tracer = tracer
        self._graph = graph
        self._calls = calls
        self._streams: dict[Node, int] = {}
        self._first_stream = next((call.stream for call in calls.values()), tracer.stream())

    def ops(self, order: Sequence[Node]) -> Iterator[Op]:
        for node in order:
            leaves = [name for name in node.inputs if name not in self._graph.producer]
            yield from self._pool_arrays(leaves)
            yield self._op(node)

    def _pool_arrays(self, names: Sequence[str]) -> Iterator[Op]:
        """Say of arrays of a pool that no op of the trace has made what memory they have."""
        for name in names:
            if name in self._tracer.known:
                continue
            self._tracer.known.add(self._full(name))
            array = self._tracer.array(name)
            pool = None if array is None else self._tracer.pools.get(address_of(array))
            if pool is not None:
                yield Op("pool", outputs=(name,), shares={name: pool})

    def _op(self, node: Node) -> Op:
        inputs, outputs = tuple(map(self._full, node.inputs)), tuple(map(self._full, node.outputs))
        self._tracer.known.update(outputs)
        stream = self._streams[node] = self._stream(node)
        roles = self._roles(node)
        shares: dict[Array, Array] = {}
        bindings = [
            Binding(name, roles.get(i, Role.INPUT), self._elements(node, i))
            for i, name in enumerate(inputs)
        ]
        if node.primitive in VIEWS:
            shares = dict.fromkeys(outputs, inputs[0]) if inputs else {}
        elif node.primitive == "Depends":
            shares = dict(zip(outputs, inputs, strict=False))
        elif Role.POOL_WRITE in roles.values():
            shares = dict(zip(outputs, (inputs[i] for i in roles), strict=True))
        else:
            bindings += [Binding(name, Role.OUTPUT) for name in outputs]
        is_view = node.primitive in VIEWS or node.primitive == "Depends"
        donates = {outputs[0]: inputs[0]} if node.primitive == "SliceUpdate" else {}
        accesses = self._accesses(node, bindings)
        name, context = node.primitive, None
        if name == "Concatenate":
            context = f"{outputs[0]}"
        return Op(
            name,
            stream,
            inputs,
            outputs,
            () if is_view else tuple(bindings),
            shares,
            donates,
            accesses,
            max(1, len(inputs)) if context else 1,
            context,
        )

    def _accesses(self, node: Node, bindings: Sequence[Binding]) -> tuple[Access, ...] | None:
        """What a pool op touches; None: all that it binds."""
        call = self._calls.get(node)
        if call is None:
            assert node.primitive not in ROLES, f"a {node.primitive} whose call is not known"
            return None
        self._tracer.counts[node.primitive] += 1
        read, written = (frozenset(blocks) for blocks in call.blocks())
        accesses = []
        for binding in bindings:
            if binding.role not in (Role.POOL_READ, Role.POOL_WRITE):
                accesses.append(Access(binding.array, binding.role is Role.OUTPUT))
                continue
            if read:
                accesses.append(Access(binding.array, False, read))
            if written:
                accesses.append(Access(binding.array, True, written))
        return tuple(accesses)

    def _stream(self, node: Node) -> int:
        """The stream of a node: its call's, or that of a node that it depends on."""
        call = self._calls.get(node)
        if call is not None:
            return call.stream
        producers = (self._graph.producer.get(name) for name in node.inputs)
        return next((self._streams[p] for p in producers if p), self._first_stream)

    def _roles(self, node: Node) -> dict[int, Role]:
        """How the node binds its inputs that are the pool's, scales included."""
        roles = dict(ROLES.get(node.primitive, {}))
        call = self._calls.get(node)
        for i in call.scales if call else ():
            roles[len(node.inputs) + i] = roles[max(roles)]
        return roles

    def _elements(self, node: Node, index: int) -> int:
        if index not in self._roles(node):
            return 0
        return self._tracer.elements(self._calls[node])

    def _full(self, name: str) -> str:
        return self._tracer.full_name(name)


def address_of(array: mx.array) -> int:
    """Where an evaluated array begins; 0 if it cannot be looked at without a copy."""
    if array.dtype == mx.bfloat16:
        return 0
    return int(np.asarray(array).__array_interface__["data"][0])
