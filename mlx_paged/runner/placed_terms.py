"""The terms of rows whose factors are in stacks, here and in other processes."""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.nn as nn
import numpy as np

from mlx_paged.ops.low_rank_terms import RowSlots
from mlx_paged.request import Variant
from mlx_paged.runner.batch import Batch, Layout
from mlx_paged.runner.low_rank_layers import AdaptedLayers, Group, LowRankTerms
from mlx_paged.runner.low_rank_places import Factors, Numbers, Place
from mlx_paged.runner.low_rank_stacks import RankStacks
from mlx_paged.runner.row_terms import MakeTerms
from mlx_paged.scheduler.step import Span

Placed = Mapping[int, tuple[RankStacks, int]]
"""Where factors are, by the number of the variant: the stacks and the slot."""
Wanted = Mapping[int, Variant]
"""Variants by their numbers."""
_HEADER = struct.Struct("<I")


def variants_of(requests: Iterable[Any]) -> Wanted:
    """The variants that requests have."""
    found: Iterable[Variant | None] = (request.variant for request in requests)
    return {each.number: each for each in found if each is not None}


class BatchTerms:
    """Makes the terms of batches, and keeps those of the latest one; a :class:`MakeTerms`.

    Args:
        place: tells where the factors of variants are, which are there then.
    """

    def __init__(self, place: Callable[[Wanted], Placed]) -> None:
        self._place = place
        self._latest: tuple[Any, LowRankTerms] | None = None

    def forget(self) -> None:
        """The stacks change."""
        self._latest = None

    def bring(self, spans: Sequence[Span]) -> None:
        """Place the variants of all these spans."""
        if wanted := variants_of(span.request for span in spans):
            self._place(wanted)

    def __call__(self, batch: Batch) -> LowRankTerms | None:
        """The terms of a batch's rows; None: no request of the batch has a variant."""
        wanted = variants_of(span.request for span in batch.spans)
        if not wanted:
            return None
        variants = [span.request.variant for span in batch.spans]
        numbers = [0 if each is None else each.number for each in variants]
        lengths = [len(span) for span in batch.spans]
        known = numbers, lengths, batch.tokens.size, batch.layout
        if self._latest is not None and self._latest[0] == known:
            return self._latest[1]
        self._latest = None
        found = self._place(wanted)
        groups = []
        for stacks in sorted({each for each, _ in found.values()}, key=lambda each: each.rank):
            slots = {number: slot for number, (own, slot) in found.items() if own is stacks}
            own = [slots.get(number, -1) for number in numbers]
            rows = np.full(len(batch.tokens), -1, np.int32)
            rows[: batch.num_tokens] = np.repeat(np.array(own, np.int32), lengths)
            groups.append(Group(RowSlots.known(rows), stacks.pairs))
        terms = LowRankTerms(groups, are_sequences=batch.layout is Layout.CHUNK)
        self._latest = known, terms
        return terms


@dataclass(frozen=True)
class Put:
    """Factors that a slot of some stacks has got.

    Attributes:
        number: of the variant.
        stacks: where the slot is.
        alive: numbers of all stacks that are left.
        factors: of whole layers.
    """

    number: int
    stacks: RankStacks
    slot: int
    alive: list[int]
    factors: Factors

    def content(self, places: Mapping[str, Place], part: int) -> bytes:
        """What :meth:`Mirror.put` of another process takes, with its part of the factors."""
        stacks, pieces = self.stacks, list[Numbers]()
        for path, pair in self.factors.items():
            pieces += places[path].part(pair, part)
        head = {
            "number": self.number,
            "stacks": [stacks.number, stacks.rank, stacks.capacity, stacks.num_slots],
            "slot": self.slot,
            "alive": self.alive,
            "layers": [(path, a.shape[-2]) for path, (a, _) in self.factors.items()],
        }
        written = json.dumps(head).encode()
        return b"".join([_HEADER.pack(len(written)), written, *(p.tobytes() for p in pieces)])


class TermSource(Protocol):
    """Where the terms of requests' variants come from."""

    @property
    def places(self) -> Mapping[str, Place]:
        """The layers that may have terms."""

    @property
    def terms(self) -> MakeTerms:
        """Makes the terms of steps."""

    def read_missing(self, wanted: Wanted) -> Mapping[int, Factors]:
        """The factors of variants that are not in memory, by number. Raises ValueError and OSError
        if they cannot be read; nothing has changed then."""

    def put_missing(self, missing: Mapping[int, Factors], wanted: Wanted) -> Iterable[Put]:
        """Put them into memory, where the `wanted` ones stay; tells of each. No step may be under
        way."""


class Mirror:
    """Has what another process has put into its stacks: this process's parts of it."""

    def __init__(self, model: nn.Module) -> None:
        self._places = AdaptedLayers.of(model).places
        self._stacks: dict[int, RankStacks] = {}  # by the other process's number
        self.terms = BatchTerms(self._placed)

    def put(self, content: bytes) -> None:
        """Do what a :class:`Put` of the other process has done. No step may be under way."""
        (size,) = _HEADER.unpack_from(content)
        start = _HEADER.size + size
        head: Any = json.loads(content[_HEADER.size : start])
        own, rank, capacity, num_slots = head["stacks"]
        number, slot = head["number"], head["slot"]
        if own not in self._stacks:
            self._stacks[own] = RankStacks(rank, self._places, capacity)
        for gone in self._stacks.keys() - set(head["alive"]):
            del self._stacks[gone]
        stacks = self._stacks[own]
        while stacks.num_slots < num_slots:
            stacks.grow(num_slots)
        factors: Factors = {}
        for path, num_columns in head["layers"]:
            place, numbers = self._places[path], list[Numbers]()
            for shape in place.own_shapes(num_columns):
                num_bytes = int(np.prod(shape)) * place.dtype.size
                numbers.append(np.frombuffer(content, np.uint8, num_bytes, start))
                start += num_bytes
            factors[path] = place.pair_of(numbers, num_columns)
        for before in [each for each, its in stacks.slots.items() if its == slot]:
            del stacks.slots[before]
        stacks.put(number, slot, factors)
        self.terms.forget()

    def _placed(self, wanted: Wanted) -> Placed:
        found = {
            number: (stacks, stacks.slots[number])
            for number in wanted
            for stacks in self._stacks.values()
            if number in stacks.slots
        }
        assert found.keys() == wanted.keys(), "rank 0 has not sent what a row adds"
        return found
