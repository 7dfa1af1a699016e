"""The factors of the adapters that are in memory, one stack for each layer and class of ranks."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from typing import Any

import mlx.core as mx
import numpy.typing as npt

from mlx_paged import ops
from mlx_paged.ops.low_rank_terms import write_slot
from mlx_paged.runner.low_rank_places import Factors, Pair, Place
from mlx_paged.system_memory import use_small_pages

FEWEST_SLOTS = 2
MOST_RESERVED = 1024
"""Slots for which address space is reserved, at most."""
_numbers = count(1)


class RankStacks:
    """Stacks of factors whose ranks are at most `rank`; smaller ones are filled with zeros.

    On a CPU of Linux the arrays reserve address space for `capacity` slots and take memory where
    slots are written: while there are no more slots, the arrays stay, so that graphs stay, and
    nothing is copied. Elsewhere the arrays grow to twice as many slots, with a copy.

    Attributes:
        pairs: by path of the layer both factors of all slots, ``[S, ...]``; S may be more than
            `num_slots`.
        number: of these stacks.
        slots: of each adapter, the one unused longest first.
        num_slots: that may take memory.
        are_reserved: whether the arrays reserve address space, which MLX does not count.
    """

    def __init__(self, rank: int, places: Mapping[str, Place], capacity: int) -> None:
        self.rank = rank
        self.capacity = capacity
        self.number = next(_numbers)
        self.pairs: dict[str, Pair] = {}
        self.num_slots = 0
        self.slots: OrderedDict[int, int] = OrderedDict()  # by the adapter's number
        self.are_reserved = _reserves()
        self._room = min(capacity, MOST_RESERVED) if self.are_reserved else 0
        self._places = places

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in all layers."""
        return sum(self._places[path].num_bytes(self.rank) for path in self.pairs)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def bytes_with(self, paths: Iterable[str], num_slots: int) -> int:
        """Bytes of the stacks if they had the layers at `paths`, too, and `num_slots` slots."""
        wanted = self.pairs.keys() | set(paths)
        return num_slots * sum(self._places[path].num_bytes(self.rank) for path in wanted)

    def find(self, number: int) -> int | None:
        """The slot of an adapter, which is used now; None: it is not here."""
        slot = self.slots.get(number)
        if slot is not None:
            self.slots.move_to_end(number)
        return slot

    def free_slot(self) -> int | None:
        """A slot of no adapter; None: there is none."""
        free = set(range(self.num_slots)).difference(self.slots.values())
        return min(free, default=None)

    def evict(self, kept: Collection[int]) -> bool:
        """Give up the slot of the adapter that was unused longest and is not `kept`; returns
        whether there was one."""
        number = next((each for each in self.slots if each not in kept), None)
        if number is not None:
            del self.slots[number]
        return number is not None

    def grow(self, most: int) -> None:
        """Add slots, up to `most` in all: one if it is reserved, else as many as there are. No step
        may be under way."""
        if self.num_slots < self._room:
            self.num_slots += 1
            return
        longer = min(most, max(FEWEST_SLOTS, 2 * self._room))
        more = longer - self._room
        self.pairs = {p: (_longer(a, more), _longer(b, more)) for p, (a, b) in self.pairs.items()}
        mx.eval(list(self.pairs.values()))
        self.num_slots = self._room = longer
        self.are_reserved = False

    def put(self, number: int, slot: int, factors: Factors) -> None:
        """Write the factors of this process's part of an adapter into a free slot, in place. No
        step may be under way."""
        new = factors.keys() - self.pairs.keys()
        for path in new:
            a, b = self._places[path].own_shapes(self.rank)
            self.pairs[path] = self._zeros(path, a), self._zeros(path, b)
        mx.eval([self.pairs[path] for path in new], list(factors.values()))
        stacks, rows = list[mx.array](), list[mx.array | None]()
        for path, pair in self.pairs.items():
            stacks += pair
            rows += factors.get(path, (None, None))
        write_slot(stacks, rows, slot)
        self.slots[number] = slot

    def _zeros(self, path: str, shape: tuple[int, ...]) -> mx.array:
        capacity = self._room if self.are_reserved else 0
        zeros = ops.pool_zeros((self._room, *shape), self._places[path].dtype, capacity=capacity)
        if self.are_reserved:
            mx.eval(zeros)
            memory = _memory(zeros)
            use_small_pages(memory.__array_interface__["data"][0], memory.nbytes)
        return zeros


def _reserves() -> bool:
    """Whether arrays on the default device can reserve address space."""
    one = ops.pool_zeros((1, 1), mx.float32, capacity=2)
    mx.eval(one)
    return ops.grown_in_place(one, 2) is not None


def _longer(stack: mx.array, more: int) -> mx.array:
    return mx.concatenate([stack, mx.zeros((more, *stack.shape[1:]), stack.dtype)])


def _memory(array: mx.array) -> npt.NDArray[Any]:
    """The memory of an array that has been computed, as bytes: ``[..., columns * itemsize]``."""
    return ops.as_numpy(array.view(mx.uint8))
