"""The adapters of an engine: their names, and which of them are in memory."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import finalize

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged.adapters.content import Content, Factors
from mlx_paged.adapters.formats import content_of, read_adapter
from mlx_paged.adapters.layers import AdaptedLayers, Group, LowRankTerms
from mlx_paged.adapters.places import Place
from mlx_paged.adapters.stacks import RankStacks
from mlx_paged.arguments import is_finite, memory, one_line, shown
from mlx_paged.holdings import Holding
from mlx_paged.options import PoolConfig
from mlx_paged.runner.batch import Batch, Layout

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
        self._alive = set[int]()  # numbers of adapters that somebody has
        self._rows: tuple[Any, LowRankTerms] | None = None  # of the latest batch
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
    def named(self) -> Mapping[str, Adapter]:
        """The adapters that requests may have, by name. Any thread may read them."""
        return dict(self._named)

    @property
    def num_bytes(self) -> int:
        """Bytes of the stacks."""
        return sum(stacks.num_bytes for stacks in self._stacks.values())

    def holdings(self) -> list[Holding]:
        """The line of a ledger of memory."""
        is_mlx = not any(stacks.are_reserved for stacks in self._stacks.values())
        return [
            Holding("adapters", self.num_bytes, self.budget, is_mlx),
            Holding("adapters_waiting", self._waiting_bytes, self._most_waiting, is_mlx=True),
        ]

    @property
    def _most_waiting(self) -> int:
        return self.budget // WAITING_PART

    @property
    def _waiting_bytes(self) -> int:
        with self._changing:
            return sum(map(_bytes_of, self._waiting.values()))

    @property
    def num_alive(self) -> int:
        """Versions that have a name or a request."""
        return len(self._alive)

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
        content = _read(name, folder, self.layers.places)
        return AdapterFiles(folder, content.factors, content.key)

    def load(self, name: str, files: AdapterFiles) -> Adapter:
        """Give an adapter that was read a name, which may have been another adapter's. Raises
        ValueError if it is larger than the budget."""
        made = self._add(name, files.factors, files.key, files.folder, 1.0)
        with self._changing:
            self._waiting.pop(self._loaded, None)
        self._loaded = made.number
        self._wait(made.number, files.factors)
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
                self._wait(adapter.number, self._read_again(adapter))

    def _wait(self, number: int, factors: Factors) -> None:
        """Keep what was read until a step uses it, or until what is read later needs the room."""
        with self._changing:
            self._waiting[number] = factors
            total = sum(map(_bytes_of, self._waiting.values()))
            while total > self._most_waiting and len(self._waiting) > 1:
                total -= _bytes_of(self._waiting.popitem(last=False)[1])

    def load_arrays(self, name: str, arrays: Mapping[str, mx.array], scale: float) -> Adapter:
        """The same of arrays by the names that mlx-lm gives them. Raises ValueError as
        :func:`content_of`."""
        if not is_finite(scale):
            raise ValueError(f"scale is {shown(scale)}: expected a finite number")
        content = content_of(arrays, self.layers.places, float(scale))
        return self._add(name, content.factors, content.key, None, float(scale))

    def _add(
        self, name: str, factors: Factors, key: bytes, folder: Path | None, scale: float
    ) -> Adapter:
        rank = max(a.shape[-2] for a, _ in factors.values())
        size_class = max(SMALLEST_CLASS, 1 << (rank - 1).bit_length())
        places = self.layers.places
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
        self._rows = None
        with self._changing:
            for number in self._waiting.keys() - self._alive:
                del self._waiting[number]
        for rank, stacks in list(self._stacks.items()):
            for number in stacks.slots.keys() - self._alive:
                del stacks.slots[number]
            if not stacks.slots:
                del self._stacks[rank]

    def terms(self, batch: Batch) -> LowRankTerms | None:
        """The terms of a batch's rows; None: no request of the batch has an adapter. Adapters that
        are not in memory are read. Raises ValueError and OSError if a folder has changed."""
        adapters: list[Any] = [span.request.variant for span in batch.spans]
        if not any(adapters):
            return None
        numbers = [0 if each is None else each.number for each in adapters]
        lengths = [len(span) for span in batch.spans]
        known = numbers, lengths, batch.tokens.size
        if self._rows is not None and self._rows[0] == known:
            return self._rows[1]
        self._rows = None
        wanted = {each.number: each for each in adapters if each is not None}
        found = {number: self._slot_of(each, wanted) for number, each in wanted.items()}
        groups = []
        for rank in sorted({each.size_class for each in wanted.values()}):
            own = [found[n] if n and wanted[n].size_class == rank else -1 for n in numbers]
            rows = np.full(len(batch.tokens), -1, np.int32)
            rows[: batch.num_tokens] = np.repeat(np.array(own, np.int32), lengths)
            groups.append(Group(mx.array(rows), self._stacks[rank].pairs))
        terms = LowRankTerms(groups, are_sequences=batch.layout is Layout.CHUNK)
        self._rows = known, terms
        return terms

    def _slot_of(self, adapter: Adapter, wanted: Mapping[int, Adapter]) -> int:
        """The slot of an adapter in the stacks of its class, where it is put if it is not there.
        The `wanted` ones stay."""
        rank = adapter.size_class
        stacks = self._stacks.get(rank)
        slot = None if stacks is None else stacks.find(adapter.number)
        if slot is not None:
            return slot
        factors = self._factors_of(adapter)
        self._forget_dead()
        if rank not in self._stacks:
            capacity = max(1, self.budget // adapter.num_bytes)
            self._stacks[rank] = RankStacks(rank, self.layers.places, capacity)
        stacks = self._stacks[rank]
        mx.synchronize()  # the step under way may read a slot that another adapter gets
        slot = self._room(stacks, factors, wanted)
        stacks.put(adapter.number, slot, factors)
        self.loads += 1
        return slot

    def _room(self, stacks: RankStacks, factors: Factors, wanted: Mapping[int, Adapter]) -> int:
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

    def _give_up(self, kept: RankStacks, wanted: Mapping[int, Adapter]) -> bool:
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
        content = _read(adapter.name, adapter.folder, self.layers.places)
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
