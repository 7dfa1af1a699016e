"""The factors of the adapters that are in memory, one stack for each layer and class of ranks."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

import mlx.core as mx

from mlx_paged.adapters.formats import Factors
from mlx_paged.adapters.places import Pair, Place

FEWEST_SLOTS = 2


class RankStacks:
    """Stacks of factors whose ranks are at most `rank`; smaller ones are filled with zeros.

    The arrays keep their shapes while adapters come and go, so that graphs stay. They grow to twice
    as many slots.

    Attributes:
        pairs: by path of the layer both factors of all slots, ``[S, ...]``.
        slots: of each adapter, the one unused longest first.
    """

    def __init__(self, rank: int, places: Mapping[str, Place]) -> None:
        self.rank = rank
        self.pairs: dict[str, Pair] = {}
        self.num_slots = 0
        self.slots: OrderedDict[int, int] = OrderedDict()  # by the adapter's number
        self._places = places

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in all layers."""
        return sum(self._places[path].num_bytes(self.rank) for path in self.pairs)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def bytes_with(self, paths: Iterable[str], num_slots: int) -> int:
        """Bytes of the stacks if they had these layers, too, and so many slots."""
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

    def grow(self, num_slots: int) -> None:
        """Let the stacks have so many slots."""
        more, self.num_slots = num_slots - self.num_slots, num_slots
        self.pairs = {
            path: (_with_zeros(a, more), _with_zeros(b, more))
            for path, (a, b) in self.pairs.items()
        }

    def put(self, number: int, slot: int, factors: Factors) -> None:
        """Write the factors of an adapter into a free slot, in place unless a step reads them."""
        for path in factors.keys() - self.pairs.keys():
            place = self._places[path]
            shapes = place.shapes(self.rank)
            a, b = (mx.zeros((self.num_slots, *shape), place.dtype) for shape in shapes)
            self.pairs[path] = a, b
        for path, (a, b) in self.pairs.items():
            if path in factors:
                own_a, own_b = factors[path]
                missing = [(0, 0)] * (own_a.ndim - 2) + [(0, self.rank - own_a.shape[-2]), (0, 0)]
                a[slot], b[slot] = mx.pad(own_a, missing), mx.pad(own_b, missing)
            else:
                a[slot] = b[slot] = mx.array(0, a.dtype)
        mx.eval(list(self.pairs.values()))
        self.slots[number] = slot


def _with_zeros(stack: mx.array, more: int) -> mx.array:
    return mx.concatenate([stack, mx.zeros((more, *stack.shape[1:]), stack.dtype)])
