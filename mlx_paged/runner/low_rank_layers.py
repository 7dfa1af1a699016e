"""The layers of a model, which add the terms of the rows that they compute."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import local
from typing import Any, NamedTuple, Self, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.ops.low_rank_terms import (
    RowSlots,
    add_expert_terms,
    add_low_rank_terms,
    expert_slots,
    times_weight,
)
from mlx_paged.runner.low_rank_places import ROUTERS, SUMMED, Pair, Place, places_of
from mlx_paged.runner.row_terms import current
from mlx_paged.runner.skip_unsampled import attached_to, override


class Group(NamedTuple):
    """The terms of all rows whose adapters have ranks of one class.

    Attributes:
        rows: of each row the slot in the arrays of `pairs`; -1: the row has no term here.
        pairs: by path of the layer the factors of all slots, ``[S, ...]``.
    """

    rows: RowSlots
    pairs: Mapping[str, Pair]


@dataclass(eq=False)
class Routed:
    """What a router gives its layers of experts.

    Attributes:
        experts: of each row, ``[..., k]``.
        known: by number of a group the experts of pairs of a row and an expert, as the layers
            compute them, and the slots of these pairs, which the layers share.
    """

    experts: mx.array
    known: dict[int, tuple[mx.array, RowSlots]] = field(default_factory=dict)


class LowRankTerms:
    """The terms of one forward's rows; a :class:`RowTerms`.

    Args:
        are_sequences: the rows are sequences of equal lengths, one after another, and a layer may
            compute one token of each at a time, as recurrent layers do.
    """

    def __init__(self, groups: Sequence[Group], are_sequences: bool = False) -> None:
        self._groups = groups
        self._are_sequences = are_sequences

    @cached_property
    def arrays(self) -> list[mx.array]:
        """Of each group the slots, then the factors of its layers."""
        found = list[mx.array]()
        for rows, pairs in self._groups:
            found.append(rows.slots)
            for pair in pairs.values():
                found += pair
        return found

    @cached_property
    def form(self) -> int:
        """A hash of the paths of all layers, in order."""
        return hash(tuple(tuple(pairs) for _, pairs in self._groups)) >> 2

    def with_arrays(self, arrays: list[mx.array]) -> Self:
        given = iter(arrays)
        groups = []
        for _, pairs in self._groups:
            rows = RowSlots(next(given))
            groups.append(Group(rows, {path: (next(given), next(given)) for path in pairs}))
        return type(self)(groups, self._are_sequences)

    def only(self, rows: mx.array, are_sequences: bool = False) -> Self:
        groups = []
        for own, pairs in self._groups:
            slots = mx.take(own.slots, rows)
            groups.append(Group(RowSlots(slots), pairs))
        return type(self)(groups, are_sequences)

    def added(self, path: str, x: mx.array, y: mx.array) -> mx.array:
        """The output `y` of a linear layer for `x`, with the terms of its rows."""
        for rows, pairs in self._groups:
            if path in pairs:
                count = y.size // y.shape[-1]
                if self._are_sequences and len(rows.slots) != count:
                    rows = RowSlots(rows.slots.reshape(count, -1)[:, 0])
                y = add_low_rank_terms(y, x, *pairs[path], rows)
        return y

    def added_to_experts(
        self, path: str, x: mx.array, y: mx.array, experts: mx.array, routed: Routed
    ) -> mx.array:
        """The output `y` of a layer of experts for `x`, with the terms of its rows.

        Args:
            experts: of each pair of a row and an expert that the layer computes: ``[..., k]`` as
                those of `routed`, or ``[n]``, if the pairs are in the order of the experts.
        """
        for number, (rows, pairs) in enumerate(self._groups):
            if path not in pairs:
                continue
            a, b = pairs[path]
            known = routed.known.get(number)
            if known is None or known[0] is not experts:
                slots = _of_pairs(rows.slots, experts, routed.experts)
                known = experts, expert_slots(slots, experts, a.shape[1])
                routed.known[number] = known
            y = add_expert_terms(y, x, a, b, known[1])
        return y


def _of_pairs(slots: mx.array, experts: mx.array, of_rows: mx.array) -> mx.array:
    """The slots of pairs of a row and an expert, of the shape of `experts`."""
    count = of_rows.shape[-1]
    assert len(slots) * count == of_rows.size, "a layer computes other rows than the step"
    if experts.shape == of_rows.shape:
        return mx.repeat(slots, count).reshape(experts.shape)
    return mx.take(slots, mx.argsort(of_rows.flatten()) // count)  # as mlx-lm orders them


OWN_GRAPHS = {"_step": "_decode_core"}
"""Attributes in which layers of models keep a compiled function, and the methods that it computes:
kimi_k3's on a GPU."""


def _keep_no_graph(module: nn.Module) -> None:
    """Let a layer that compiles its decode itself compute it uncompiled: the graph would keep the
    terms of the rows with which it was traced."""
    for compiled, method in OWN_GRAPHS.items():
        if compiled in vars(module) and hasattr(module, method):
            setattr(module, compiled, getattr(module, method))


class _OfThread(local):
    """What a router of the thread gives its layers."""

    routed: Routed | None = None


class AdaptedLayers:
    """Makes the layers of a model add terms. Each layer gets a subclass of its class; parameters
    and the module tree do not change.

    Attributes:
        places: the layers, by path.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of_thread = _OfThread()
        self.places: Mapping[str, Place] = places_of(model)
        modules = dict(model.named_modules())
        for path, place in self.places.items():
            add = self._linear if place.experts is None else self._expert
            if isinstance(modules[path], SUMMED):
                add = self._summed
            override(modules[path], "__call__", partial(add, path))
        for module in modules.values():
            if isinstance(module, ROUTERS):
                override(module, "__call__", self._route)
            _keep_no_graph(module)

    @classmethod
    def of(cls, model: nn.Module) -> "AdaptedLayers":
        """The model's own; engines on the same model share it."""
        return attached_to(model, "adapted_layers", cls)

    def _linear(self, path: str, layer: Callable[..., mx.array], x: mx.array) -> mx.array:
        y, terms = layer(x), current()
        return terms.added(path, x, y) if isinstance(terms, LowRankTerms) else y

    def _summed(self, path: str, layer: Callable[..., mx.array], x: mx.array) -> mx.array:
        """A layer that adds up the outputs of all processes: each adds its own part of the terms
        before, so that there is one sum."""
        terms, module = current(), cast(Any, layer).__self__
        if not isinstance(terms, LowRankTerms):
            return layer(x)
        y = terms.added(path, x, times_weight(module, x))
        y = mx.distributed.all_sum(y, group=module.group)
        return y + module["bias"] if "bias" in module else y

    def _expert(
        self,
        path: str,
        layer: Callable[..., mx.array],
        x: mx.array,
        indices: mx.array,
        **options: Any,
    ) -> mx.array:
        y, terms, routed = layer(x, indices, **options), current(), self._of_thread.routed
        if not isinstance(terms, LowRankTerms):
            return y
        assert routed is not None
        return terms.added_to_experts(path, x, y, indices, routed)

    def _route(self, router: Callable[..., mx.array], x: mx.array, indices: mx.array) -> mx.array:
        self._of_thread.routed = Routed(indices)
        try:
            return router(x, indices)
        finally:
            self._of_thread.routed = None
