"""The blocks of a pool: in use, kept for reuse, or free. Knows no mlx."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.cached_block import CachedBlock
from mlx_paged.kv.eviction import EvictionOrder, WorthOrder
from mlx_paged.kv.layer_groups import ONE_GROUP, LayerGroup
from mlx_paged.kv.prefix_cache import PrefixCache


class OutOfBlocksError(RuntimeError):
    """The pool has fewer available blocks than a call needs; the call changed nothing.

    Args:
        expected: what would do; part of the message.
    """

    def __init__(self, needed: int, available: int, expected: str = "") -> None:
        super().__init__(f"{needed} KV blocks needed, {available} available{expected}")
        self.needed = needed
        self.available = available


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy block `src` to block `dst` before any write, in the arrays of layer group `group`."""

    src: int
    dst: int
    group: int = 0


@dataclass(slots=True)
class BlockTransfer:
    """The content of an entry, or the recurrent states after it, on its way from or to a pool."""

    key: bytes  # the name of the content outside the pool
    group: int
    blocks: Sequence[int]  # the entry's blocks; none for recurrent states
    # On the way into the pool: a matrix of bytes, and which row of the matrix is this content.
    # On the way out: a function, which returns the bytes once the step has ended. The runner sets
    # this function; before that the payload is None.
    payload: Any = None
    state: int = 0  # id of the recurrent states
    note: Any = None  # of what takes it out of the pool
    worth: int = 0  # of recurrent states that were used; 0: they were not


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class BlockStore:
    """Hands out blocks and takes them back, for all layer groups.

    An entry of a group's block table is one block or more. Arguments and results name an entry by
    its first block. A released entry of known content stays idle in the prefix cache of its group
    until memory is needed; then any group may use the blocks of this entry.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[LayerGroup] = ONE_GROUP,
        make_order: Callable[[int], EvictionOrder] = WorthOrder,
    ) -> None:
        # A stack of free blocks; the last one is taken first.
        self.free = list(range(num_blocks - 1, -1, -1))
        self.counts = [0] * num_blocks  # how many sequences hold each entry, by its first block
        # The entries of pending copies: a target maps to the entry whose content it gets, and a
        # source maps to itself.
        self.origins: dict[int, int] = {}
        # Entries of known content that no sequence holds.
        self.idle = make_order(num_blocks)
        # What is known of the entries' content, for each group.
        self.prefixes = [
            PrefixCache(num_blocks, block_size, self.idle, group.keeps_all, group.width)
            for group in groups
        ]
        self.cow_clones = 0  # entries copied so far
        self.evictions = 0  # idle entries handed out for other content so far
        # Called with the group and the content of an idle entry just before the entry is handed out
        # for other content: the K/V of the old content is still in the pool.
        self.on_evict: Callable[[int, CachedBlock], None] | None = None
        self._groups = tuple(groups)
        self._block_size = np.int32(block_size)
        self._widths = [group.width for group in groups]
        self._group_of = [0] * num_blocks  # the group of each entry, by the entry's first block
        self.num_idle = 0  # blocks of all idle entries
        self._blocks: list[Int32Array] = [
            np.zeros((group.width if group.width > 1 else 0, num_blocks), np.int32)
            for group in groups
        ]

    @property
    def num_available(self) -> int:
        """How many blocks can be handed out now: free blocks, and the blocks of idle entries."""
        return len(self.free) + self.num_idle

    @property
    def blocks_in_use(self) -> int:
        return len(self.counts) - len(self.free) - self.num_idle

    def tables(self, entries: Int32Array, group: int) -> Int32Array:
        """The pool's blocks of tables of entries ``[R, M]`` for each member of the group:
        ``[members, R, M * pieces]``."""
        members, pieces = self._groups[group].members, self._groups[group].pieces
        if members * pieces == 1:
            return entries[None]
        blocks = self._blocks[group][:, entries].reshape(members, pieces, *entries.shape)
        num_rows, num_entries = entries.shape
        tables: Int32Array = np.moveaxis(blocks, 1, -1).reshape(
            members, num_rows, num_entries * pieces
        )
        return tables

    def slots(self, entries: Int32Array, positions: Int32Array, group: int) -> Int32Array:
        """The slots of positions ``[T]`` for each member of the group: ``[members, T]``. Position
        i is in entry i of `entries`."""
        members, pieces = self._groups[group].members, self._groups[group].pieces
        within, size = positions % self._block_size, self._block_size // pieces
        if members * pieces == 1:
            return (entries * self._block_size + within)[None]
        blocks = self._blocks[group][:, entries].reshape(members, pieces, -1)
        blocks = blocks[:, within // size, np.arange(len(positions))]
        return blocks * size + within % size

    def blocks_of_entries(self, entries: Int32Array, group: int) -> Int32Array:
        """The blocks ``[width, n]`` of entries ``[n]``; ``[0, n]`` where an entry is one block."""
        return self._blocks[group][:, entries]

    def put_blocks(self, entries: Sequence[int], blocks: Sequence[Any], group: int) -> None:
        """Copy from another store what its :meth:`blocks_of_entries` returned as `blocks`."""
        if blocks:
            self._blocks[group][:, entries] = blocks

    def width_of(self, entry: int) -> int:
        """How many blocks a held or idle entry is."""
        return self._widths[self._group_of[entry]]

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`; all others are used before them."""
        num_more = num_blocks - len(self.counts)
        assert num_more >= 0
        self.free[:0] = range(num_blocks - 1, len(self.counts) - 1, -1)
        self.counts += [0] * num_more
        self._group_of += [0] * num_more
        self._blocks = [np.pad(blocks, ((0, 0), (0, num_more))) for blocks in self._blocks]
        self.idle.renumber(num_blocks)

    def compact(self, num_blocks: int) -> Int32Array:
        """Shrink to `num_blocks`, which the held blocks fit in, while no copy is pending. Idle
        entries are evicted in their order until the others fit. The blocks that are
        left become the first ones, in order; returns the old number of each. The caller renumbers
        the prefix caches."""
        assert not self.origins
        while len(self.counts) - len(self.free) > num_blocks:
            self.free += self._evict(self.idle.next())
        is_free = np.zeros(len(self.counts), np.bool_)
        is_free[self.free] = True
        kept: Int32Array = np.flatnonzero(~is_free).astype(np.int32)
        num_free = num_blocks - len(kept)
        numbers = np.zeros(len(self.counts), np.int32)
        numbers[kept] = np.arange(len(kept))
        self.counts = [self.counts[block] for block in kept] + [0] * num_free
        self.free = list(range(num_blocks - 1, len(kept) - 1, -1))
        self._group_of = [self._group_of[block] for block in kept] + [0] * num_free
        more = (0, 0), (0, num_free)
        self._blocks = [np.pad(numbers[blocks[:, kept]], more) for blocks in self._blocks]
        return kept

    def require(self, needed: int, available: int | None = None) -> None:
        """Raise OutOfBlocksError if `needed` exceeds `available`, by default `num_available`."""
        if available is None:
            available = len(self.free) + self.num_idle
        if needed > available:
            raise OutOfBlocksError(needed, available)

    def take(self, num_entries: int, group: int = 0) -> list[int]:
        """Hand out entries with a reference each: of free blocks, then idle ones."""
        width = self._widths[group]
        needed = num_entries * width
        num_left = max(0, len(self.free) - needed)
        blocks = self.free[num_left:][::-1]
        del self.free[num_left:]
        while len(blocks) < needed:
            blocks += self._evict(self.idle.next())
        self.free += blocks[needed:]  # the last evicted entry may have more than needed
        entries = blocks[:needed:width]
        if width > 1:
            rows = np.array(blocks[:needed], np.int32).reshape(-1, width)
            self._blocks[group][:, entries] = rows.T
        for entry in entries:
            self.counts[entry] = 1
            self._group_of[entry] = group
        return entries

    def take_idle(self, entry: int) -> int:
        """Hand out this idle entry with one reference."""
        self._evict(entry)
        self.counts[entry] = 1
        return entry

    def copy(self, entry: int, group: int = 0) -> int:
        """Take an entry for the content of another; both stay until the copy is performed."""
        self.hold_source(entry)
        self.cow_clones += 1
        (target,) = self.take(1, group)
        self.origins[target] = self.origins[entry]
        return target

    def hold_source(self, entry: int) -> None:
        """Keep the content of an entry until the pending copies are performed."""
        self._set_busy(entry)
        self.origins.setdefault(entry, entry)

    def copies_to(self, entries: Sequence[int]) -> list[BlockCopy]:
        """The pending copies of blocks that fill these entries."""
        return [
            BlockCopy(source, target, self._group_of[entry])
            for entry in entries
            for source, target in zip(
                self.blocks_of(self.origins[entry]), self.blocks_of(entry), strict=True
            )
        ]

    def copies_done(self) -> None:
        """No copy is pending any more."""
        if not self.origins:
            return
        pending, self.origins = self.origins, {}
        self._settle([entry for entry in pending if self.counts[entry] == 0])

    def retain(self, entries: Sequence[int]) -> None:
        """Add a reference to each entry."""
        for entry in entries:
            self._set_busy(entry)
            self.counts[entry] += 1

    def release(self, entries: Sequence[int]) -> None:
        """Take a reference from each entry."""
        counts, unheld = self.counts, []
        for entry in entries:
            count = counts[entry] = counts[entry] - 1
            if not count:
                unheld.append(entry)
        self._settle([e for e in unheld if e not in self.origins] if self.origins else unheld)

    def drop_idle(self) -> None:
        """Forget all known content that no sequence holds."""
        for entry in list(self.idle):
            self.free += self._drop(entry)

    def forget_idle(self, entry: int) -> None:
        """Forget the content of an idle entry; its blocks are free."""
        prefixes = self.prefixes[self._group_of[entry]]
        self._set_busy(entry)
        prefixes.forget(entry)
        self.free += self.blocks_of(entry)[::-1]

    def is_followed(self, entry: int) -> bool:
        """Whether known content goes on after that of an entry and needs it."""
        prefixes = self.prefixes[self._group_of[entry]]
        return prefixes.is_followed(prefixes.by_block[entry])

    def refcount_histogram(self) -> dict[int, int]:
        """How many blocks have how many references; free and idle blocks count under 0."""
        widths = np.array(self._widths)[self._group_of]
        histogram = np.bincount(self.counts, weights=widths * (np.array(self.counts) > 0))
        histogram[0] = len(self.counts) - histogram.sum()
        return {count: int(n) for count, n in enumerate(histogram) if n}

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Assert that every block is free, or is part of one entry, which is idle or held; and that
        each entry has as many references as `held` says, 0 where it says nothing."""
        self.idle.check_integrity()
        for prefixes in self.prefixes:
            prefixes.check_integrity()
        for entry, source in self.origins.items():
            assert 0 <= entry < len(self.counts) and self.origins.get(source) == source
        in_use = {entry for entry, count in enumerate(self.counts) if count} | self.origins.keys()
        for entry, count in enumerate(self.counts):
            assert count == held.get(entry, 0), "a reference is not counted"
        idle = set(self.idle)
        assert idle.isdisjoint(in_use), "an idle entry is held"
        found = Counter(self.free)
        for entry in [*in_use, *idle]:
            found.update(self.blocks_of(entry))
        assert found.keys() == set(range(len(self.counts))), "a block is lost"
        assert found.total() == len(self.counts), "a block is used twice"
        assert self.num_idle == sum(map(self.width_of, idle)), "idle blocks are miscounted"
        known = {entry for prefixes in self.prefixes for entry in prefixes}
        assert known <= in_use | idle, "a free block is still cached"
        assert idle <= known, "an idle entry without known content"
        for group, prefixes in enumerate(self.prefixes):
            assert all(self._group_of[entry] == group for entry in prefixes), "another group's"

    def blocks_of(self, entry: int) -> list[int]:
        """The blocks of a held or idle entry."""
        group = self._group_of[entry]
        if self._widths[group] == 1:
            return [entry]
        blocks: list[int] = self._blocks[group][:, entry].tolist()
        return blocks

    def _set_busy(self, entry: int) -> None:
        """A sequence or a copy needs the entry again."""
        if entry in self.idle:
            self.idle.remove(entry)
            self.num_idle -= self.width_of(entry)

    def _evict(self, entry: int) -> list[int]:
        """Hand out an idle entry for other content; returns its blocks."""
        if self.on_evict is not None:
            group = self._group_of[entry]
            self.on_evict(group, self.prefixes[group].by_block[entry])
        self.evictions += 1
        return self._drop(entry)

    def _drop(self, entry: int) -> list[int]:
        """Forget the content of an idle entry; returns its blocks."""
        self._set_busy(entry)
        self.prefixes[self._group_of[entry]].evict(entry)
        return self.blocks_of(entry)

    def _settle(self, entries: list[int]) -> None:
        """Make entries that nothing holds idle if their content is known, and free otherwise."""
        group_of, widths = self._group_of, self._widths
        for entry in entries:
            group = group_of[entry]
            prefixes = self.prefixes[group]
            if (known := prefixes.by_block.get(entry)) is not None:
                self.idle.add(known, prefixes.is_followed(known))
                self.num_idle += widths[group]
            elif widths[group] == 1:
                self.free.append(entry)
            else:
                self.free += self.blocks_of(entry)[::-1]
