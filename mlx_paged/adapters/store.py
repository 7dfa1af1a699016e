"""The adapters of an engine: their names, and which of them are in memory."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, cast
from weakref import finalize

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.adapters.content import Content
from mlx_paged.adapters.formats import content_of, read_adapter
from mlx_paged.arguments import is_finite, memory, one_line, shown
from mlx_paged.holdings import CountedBy, Holding
from mlx_paged.options import PoolConfig
from mlx_paged.runner.layer_cuts import cuts_of
from mlx_paged.runner.low_rank_layers import AdaptedLayers
from mlx_paged.runner.low_rank_places import Factors, Place
from mlx_paged.runner.low_rank_stacks import RankStacks
from mlx_paged.runner.placed_terms import BatchTerms, Placed, Put, Wanted

WAITING_PART = 4
"""What was read and waits for its step takes this part of the budget at most."""
SMALLEST_CLASS = 8
"""Ranks below it count as it: an array with fewer columns saves no time."""


@dataclass(frozen=True)
class AdapterFiles:
    """What an adapter's folder had when it was read, and the hash of its numbers."""

    folder: Path
    factors: Factors
    key: bytes


@dataclass(eq=False)
class Adapter:
    """One version of an adapter. Requests hold the version with which they began; it leaves the
    memory when no name and no request has it.

    Attributes:
        name: of the adapter.
        key: a hash of all its numbers; K/V depends on it.
        number: another one for each version.
        size_class: the power of two that its ranks do not exceed.
        folder: that it is read from; None: `factors` are kept.
        scale: of an adapter of arrays.
    """

    name: str
    key: bytes
    number: int
    size_class: int
    num_bytes: int
    folder: Path | None
    factors: Factors | None = None
    scale: float = 1.0

    @property
    def version(self) -> str:
        """Its content, in 32 hexadecimal digits."""
        return self.key.hex()


class AdapterStore:
    """The adapters of one model. Any number of them has names; those that steps use are in stacks.

    The stacks take `budget` bytes at most, unless one step needs more. An adapter that is not there
    is read from its folder when a step needs it, in the place of the one unused longest.
    """

    def __init__(self, model: nn.Module, budget: int) -> None:
        self.layers = AdaptedLayers.of(model)
        self.budget = budget
        self._named: dict[str, Adapter] = {}
        self._stacks: dict[int, RankStacks] = {}  # by class of ranks
        self._numbers = count(1)
        self._alive = set[int]()  # numbers of versions that have a name or a request
        self._part = cuts_of(model).own
        self.terms = BatchTerms(self._place)
        self._reading = Lock()  # one read at a time beside the steps
        self._changing = Lock()  # of what was read
        self._waiting = OrderedDict[int, Factors]()  # that were read, until a step uses them
        self._loaded = 0  # number of the one among them that no request has asked for yet
        self.loads = 0  # of adapters into the stacks

    @classmethod
    def of(cls, model: nn.Module, config: PoolConfig) -> "AdapterStore | None":
        """A store with the adapters that the options name; None: requests have none. Raises
        ValueError if one cannot be used."""
        if config.adapters is None:
            return None
        store = cls(model, config.adapter_memory)
        for name, path in config.adapters.items():
            store.load(name, store.read(name, Path(path)))
        return store

    @property
    def places(self) -> Mapping[str, Place]:
        """The layers that an adapter may change."""
        return self.layers.places

    @property
    def named(self) -> Mapping[str, Adapter]:
        """The adapters that requests may have, by name. Any thread may read them."""
        return dict(self._named)

    @property
    def num_bytes(self) -> int:
        """Bytes of the stacks."""
        return sum(stacks.num_bytes for stacks in self._stacks.values())

    def holdings(self) -> list[Holding]:
        """The line of a ledger of memory."""
        are_reserved = any(stacks.are_reserved for stacks in self._stacks.values())
        counted_by = CountedBy.NOBODY if are_reserved else CountedBy.MLX
        return [
            Holding("adapters", self.num_bytes, self.budget, counted_by),
            Holding("adapters_waiting", self._waiting_bytes, self._most_waiting, CountedBy.MLX),
        ]

    @property
    def _most_waiting(self) -> int:
        return self.budget // WAITING_PART

    @property
    def _waiting_bytes(self) -> int:
        with self._changing:
            return sum(map(_bytes_of, self._waiting.values()))

    def find(self, name: str | None) -> Adapter | None:
        """The adapter that requests with this name get now. Raises ValueError for an unknown
        one."""
        if name is None:
            return None
        found = self._named.get(name)
        if found is None:
            known = ", ".join(sorted(self._named)[:20]) or "none, because none is loaded"
            raise ValueError(f"[SamplingParams] adapter is {shown(name)}: expected one of {known}")
        return found

    def read(self, name: str, folder: Path) -> AdapterFiles:
        """The adapter in a folder, for :meth:`load`. Any thread may call it. Raises ValueError as
        :func:`read_adapter`, with the name before the message."""
        folder = folder.resolve()
        content = _read(name, folder, self.places)
        return AdapterFiles(folder, content.factors, content.key)

    def load(self, name: str, files: AdapterFiles) -> Adapter:
        """Give an adapter that was read a name, which may have been another adapter's. Raises
        ValueError if it is larger than the budget."""
        made = self._add(name, files.factors, files.key, files.folder, 1.0)
        with self._changing:
            self._waiting.pop(self._loaded, None)
        self._loaded = made.number
        self._put_waiting(made.number, files.factors)
        return made

    def prepare(self, name: str) -> None:
        """Read the adapter with a name, unless it is in memory: the step that needs it first does
        not read it then. Any thread may call this. Raises ValueError if its files have changed or
        cannot be read."""
        adapter = self._named.get(name)
        if adapter is None or adapter.factors is not None:
            return
        if adapter.number == self._loaded:
            self._loaded = 0
        with self._reading:
            stacks = self._stacks.get(adapter.size_class)
            is_there = stacks is not None and adapter.number in stacks.slots
            if not is_there and adapter.number not in self._waiting:
                self._put_waiting(adapter.number, self._read_again(adapter))

    def _put_waiting(self, number: int, factors: Factors) -> None:
        """Keep what was read until a step uses it, or until what is read later needs the room."""
        with self._changing:
            self._waiting[number] = factors
            total = sum(map(_bytes_of, self._waiting.values()))
            while total > self._most_waiting and len(self._waiting) > 1:
                total -= _bytes_of(self._waiting.popitem(last=False)[1])

    def load_arrays(self, name: str, arrays: Mapping[str, mx.array], scale: float) -> Adapter:
        """Give an adapter of arrays a name. The arrays have the names that mlx-lm gives them.
        Raises ValueError as :func:`content_of`."""
        if not is_finite(scale):
            raise ValueError(f"scale is {shown(scale)}: expected a finite number")
        content = content_of(arrays, self.places, float(scale))
        return self._add(name, content.factors, content.key, None, float(scale))

    def _add(
        self, name: str, factors: Factors, key: bytes, folder: Path | None, scale: float
    ) -> Adapter:
        rank = max(a.shape[-2] for a, _ in factors.values())
        size_class = max(SMALLEST_CLASS, 1 << (rank - 1).bit_length())
        places = self.places
        num_bytes = sum(places[path].num_bytes(size_class) for path in factors)
        if num_bytes > self.budget:
            raise ValueError(
                f"the adapter takes {memory(num_bytes)}: expected at most adapter_memory, "
                f"{memory(self.budget)}"
            )
        kept = factors if folder is None else None
        adapter = Adapter(
            name, key, next(self._numbers), size_class, num_bytes, folder, kept, scale
        )
        self._alive.add(adapter.number)
        finalize(adapter, self._alive.discard, adapter.number)
        self._named[name] = adapter
        self._forget_dead()
        return adapter

    def unload(self, name: str) -> bool:
        """Take the name away; requests that have the adapter go on. Returns whether there was
        one."""
        found = self._named.pop(name, None) is not None
        self._forget_dead()
        return found

    def _forget_dead(self) -> None:
        """Give up the slots of adapters that nobody has, and stacks without a slot in use."""
        self.terms.forget()
        with self._changing:
            for number in self._waiting.keys() - self._alive:
                del self._waiting[number]
        for rank, stacks in list(self._stacks.items()):
            for number in stacks.slots.keys() - self._alive:
                del stacks.slots[number]
            if not stacks.slots:
                del self._stacks[rank]

    def _place(self, wanted: Wanted) -> Placed:
        """Where the factors of adapters are, which are read if they are not in memory. Raises
        ValueError and OSError if a folder has changed."""
        if missing := self.read_missing(wanted):
            mx.synchronize()  # the step under way may read a slot that another adapter gets
            for _ in self.put_missing(missing, wanted):
                pass
        adapters: Any = wanted.values()
        found = {each.number: self._stacks[each.size_class] for each in adapters}
        return {number: (stacks, stacks.slots[number]) for number, stacks in found.items()}

    def read_missing(self, wanted: Wanted) -> dict[int, Factors]:
        """The factors of adapters that are not in the stacks; the others are used now. Raises
        ValueError and OSError if a folder has changed."""
        missing, adapters = dict[int, Factors](), cast(Mapping[int, Adapter], wanted)
        for number, adapter in adapters.items():
            stacks = self._stacks.get(adapter.size_class)
            if stacks is None or stacks.find(number) is None:
                missing[number] = self._factors_of(adapter)
        return missing

    def put_missing(self, missing: Mapping[int, Factors], wanted: Wanted) -> Iterator[Put]:
        """Put them into the stacks of their classes, where the `wanted` ones stay."""
        for number, factors in missing.items():
            adapter: Any = wanted[number]
            self._forget_dead()
            rank = adapter.size_class
            if rank not in self._stacks:
                capacity = max(1, self.budget // adapter.num_bytes)
                self._stacks[rank] = RankStacks(rank, self.places, capacity)
            stacks = self._stacks[rank]
            slot = self._room(stacks, factors, wanted)
            stacks.put(number, slot, self._own_part(factors))
            self.loads += 1
            yield Put(number, stacks, slot, [s.number for s in self._stacks.values()], factors)

    def _own_part(self, factors: Factors) -> Factors:
        """The factors of this process's part of the layers."""
        places = self.places
        return {
            path: pair
            if (place := places[path]).cut is None
            else place.pair_of(place.part(pair, self._part), pair[0].shape[-2])
            for path, pair in factors.items()
        }

    def _room(self, stacks: RankStacks, factors: Factors, wanted: Wanted) -> int:
        """A free slot; the stacks grow within the budget, or an adapter leaves."""
        while True:
            free, num_slots = stacks.free_slot(), stacks.num_slots
            others = self.num_bytes - stacks.num_bytes
            most = (self.budget - others) // stacks.bytes_with(factors, 1)
            if free is not None:
                if num_slots <= most or not self._give_up(stacks, wanted):
                    return free
            elif num_slots < most:
                stacks.grow(most)
            elif not (stacks.evict(wanted) or self._give_up(stacks, wanted)):
                stacks.grow(num_slots + 1)

    def _give_up(self, kept: RankStacks, wanted: Wanted) -> bool:
        """Give up all stacks of another class of ranks, none of whose adapters is wanted; returns
        whether there were any."""
        for rank, stacks in list(self._stacks.items()):
            if stacks is not kept and wanted.keys().isdisjoint(stacks.slots):
                del self._stacks[rank]
                return True
        return False

    def _factors_of(self, adapter: Adapter) -> Factors:
        if adapter.factors is not None:
            return adapter.factors
        with self._changing:
            waiting = self._waiting.pop(adapter.number, None)
        return self._read_again(adapter) if waiting is None else waiting

    def _read_again(self, adapter: Adapter) -> Factors:
        assert adapter.folder is not None
        content = _read(adapter.name, adapter.folder, self.places)
        if content.key != adapter.key:
            raise ValueError(
                f"adapter {adapter.name} in {adapter.folder} has changed: expected the files with "
                "which it was loaded, or a new load"
            )
        return content.factors


def _read(name: str, folder: Path, places: Mapping[str, Place]) -> Content:
    """The adapter in a folder; its name stands before the message of an error."""
    try:
        return read_adapter(folder, places)
    except (ValueError, OSError) as error:
        raise ValueError(f"adapter {name:.100}: {one_line(error)}") from error


def _bytes_of(factors: Factors) -> int:
    return sum(each.nbytes for pair in factors.values() for each in pair)
