"""Which known content that no sequence holds leaves the pool next. Knows no mlx."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from typing import Protocol

from mlx_paged.kv.cached_block import FIRST, CachedBlock
from mlx_paged.kv.frequency import ONE, log2_of, together
from mlx_paged.kv.pins import Pins

HALF_LIFE = 1
"""A use counts half as much after so many pools of blocks have been evicted."""

FOLLOWERS = 4
"""So many texts may go on after a block and count as used as the block, before one of them is used
again. Behind a system prompt of one-off prompts no more do."""

MOST_KEPT = 7 / 8
"""The part of the pool that idle blocks which were used again may take before they are evicted like
the others: new conversations get the rest."""

MAX_PINNED = 0.25
"""The part of the pool that one owner may pin, unless an option says otherwise."""

MARKED_USES = 2
"""A marked block counts as used so many times more: before blocks only written, and after a
conversation that goes on, whose blocks may be marked, too."""

GHOSTS_PER_BLOCK = 4
GHOST_SAMPLE = 4
"""Of evicted blocks one in `GHOST_SAMPLE` is remembered, `GHOSTS_PER_BLOCK` for each block of the
pool: together as many as 16 pools held."""


class EvictionOrder(Protocol):
    """The known blocks that no sequence holds, in the order in which they are evicted."""

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned, idle or not."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def __contains__(self, block: object) -> bool: ...

    def registered(self, known: CachedBlock, before: CachedBlock | None) -> None:
        """The content of a block is known from here on; `before` is the block that it follows."""

    def used(self, known: CachedBlock, before: CachedBlock | None) -> None:
        """A text was found to begin with a block, which is held. `before` is needed where the block
        is not used yet."""

    def add(self, known: CachedBlock, is_followed: bool) -> None:
        """Nothing holds the block. `is_followed`: known blocks go on after it."""

    def remove(self, block: int) -> None:
        """The block is held, or its content is forgotten."""

    def last_of_its_text(self, known: CachedBlock) -> None:
        """No known block goes on after the block any more."""

    def give_up(self, known: CachedBlock) -> None:
        """The content of a block is of no use any more: the block is the first to go."""

    def pin(self, known: CachedBlock, until: float) -> str | None:
        """Evict all others before the block until that time; returns why not, or None."""

    @property
    def has_ends(self) -> bool:
        """Whether there is a pin or a mark."""

    def mark(self, known: CachedBlock, seconds: float, now: float) -> None:
        """Raise the worth of a block for so many seconds, and again when it is used meanwhile."""

    def expire(self, now: float) -> None:
        """Pins and marks that end by `now` have ended."""

    def forgotten(self, known: CachedBlock) -> None:
        """The content of a block is not known any more."""

    def evicted(self, known: CachedBlock) -> None:
        """The content of a full block was given up for other content."""

    def value(self, known: CachedBlock) -> int:
        """What a block is worth now, times how often it is used: of two that are not pinned, the
        one with less goes first. In :data:`~mlx_paged.kv.worth.UNIT`."""

    def next(self) -> int:
        """The block to evict now; there is one. Each call counts as an eviction."""

    def renumber(self, num_blocks: int) -> None:
        """The pool has `num_blocks` blocks, and known blocks may have other numbers."""

    def check_integrity(self) -> None:
        """Assert that all books agree."""


Entry = tuple[float, int, CachedBlock]
"""Rank, stamp and block."""


class WorthOrder:
    """Blocks that were only written go before blocks that were used again; of the others those go
    first whose worth is least: operations to compute them again, per byte, times how often they are
    used.

    - A block that was written since it was used is like pages read once by a scan: a sweep of
      one-off prompts evicts its own blocks (segmented LRU; Karedla et al. 1994, IEEE Computer
      27(3)). Blocks that were used take at most `MOST_KEPT` of the pool before they go too.
    - How often a block is used is a frequency in which a use counts half as much after
      `HALF_LIFE`. So a conversation that has ended goes at last, however often it was used.
    - What a conversation adds counts as used as what the conversation had, because its next turn
      needs both. Where texts part, each gets a share of what they have in common: a conversation is
      not used as often as the system prompt of all. Behind a prefix that many different prompts
      share nothing is got: see `FOLLOWERS`.
    - A block goes after all known blocks that go on after it, unless one of them is held.
    - A marked block counts as used :data:`MARKED_USES` times more until its mark ends; each use
      renews the mark.
    - Pinned blocks go after all others, first those whose pin ends first. What a request needs, it
      gets: pins make no request wait.
    - Content that returns after it was evicted counts as used (2Q; Johnson and Shasha 1994, VLDB),
      and as often as before.

    Time is counted in evictions. No clock is read: the scheduler says when pins have ended. Each
    method takes O(log n) for n idle blocks, amortised.
    """

    def __init__(self, num_blocks: int, max_pinned: float = MAX_PINNED) -> None:
        self.pins = Pins(num_blocks, max_pinned)
        self._idle: dict[int, CachedBlock] = {}  # by number, the one unused longest first
        # The ranks, stamps and blocks that no known block follows. An entry counts if the block
        # still has its stamp.
        self._written: list[Entry] = []
        self._used: list[Entry] = []
        self._pinned: list[Entry] = []
        self._marks: list[tuple[float, int, CachedBlock]] = []  # by the earliest end
        self._now = 0.0  # the latest time that the scheduler has told
        self._num_used = 0  # idle blocks that count as used
        self._age = 0  # half-lives that have passed
        self._num_stamps = 0
        # Hashes of evicted blocks, and their scores; None: they were not used.
        self._ghosts: OrderedDict[bytes, int | None] = OrderedDict()
        self._set_size(num_blocks)

    @property
    def num_pinned(self) -> int:
        return self.pins.num_blocks

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        return iter(self._idle)

    def __contains__(self, block: object) -> bool:
        return block in self._idle

    def registered(self, known: CachedBlock, before: CachedBlock | None) -> None:
        gives_way = known.uses == FIRST
        if self._ghosts and known.hash in self._ghosts and not gives_way:
            self._count_use(known, self._ghosts.pop(known.hash))
        if before is None:
            return
        before.followers += 1
        if before.stamp:
            before.stamp = self._new_stamp()  # its entry does not count any more
            before.is_last = False
        is_near = before.followers <= FOLLOWERS * (1 + before.used_followers)
        if before.uses > 0 and is_near and not gives_way:
            share = before.score
            if before.followers > 1:
                share -= log2_of(max(1, before.used_followers))
            known.score = share if known.uses <= 0 else max(known.score, share)
            known.uses = max(known.uses, before.uses)

    def used(self, known: CachedBlock, before: CachedBlock | None) -> None:
        if not known.is_used:
            known.is_used = True
            if before is not None:
                before.used_followers += 1
        if known.marked_until:
            known.marked_until = max(known.marked_until, self._now + known.marked_s)
        self._count_use(known, known.score if known.uses > 0 else None)

    def add(self, known: CachedBlock, is_followed: bool) -> None:
        known.stamp = self._new_stamp()
        self._idle[known.block] = known
        self._num_used += self._is_used(known)
        known.rank = known.pinned_until or self._place_of(known)
        if not is_followed:
            self.last_of_its_text(known)

    def remove(self, block: int) -> None:
        known = self._idle.pop(block)
        known.stamp, known.is_last = 0, False
        self._num_used -= self._is_used(known)

    def last_of_its_text(self, known: CachedBlock) -> None:
        if not known.stamp:
            return
        known.is_last = True
        heap = self._written if self._uses(known) <= 0 else self._used
        if known.pinned_until:
            heap = self._pinned
        heappush(heap, (known.rank, known.stamp, known))
        if len(heap) > 2 * len(self._idle) + 64:
            heap[:] = filter(self._counts, heap)
            heapify(heap)

    def give_up(self, known: CachedBlock) -> None:
        with self._changing(known):
            known.uses = FIRST
            self.pins.remove(known)

    def pin(self, known: CachedBlock, until: float) -> str | None:
        if (reason := self.pins.refuses(known)) is None:
            with self._changing(known):
                self.pins.add(known, until)
        return reason

    @property
    def has_ends(self) -> bool:
        return bool(self.num_pinned or self._marks)

    def mark(self, known: CachedBlock, seconds: float, now: float) -> None:
        self._now, is_new = max(self._now, now), not known.marked_until
        with self._changing(known):
            known.marked_s = max(known.marked_s, seconds)
            known.marked_until = max(known.marked_until, now + seconds)
        if is_new:
            heappush(self._marks, (known.marked_until, self._new_stamp(), known))
        if len(self._marks) > 2 * self._num_blocks + 64:
            self._marks = [each for each in self._marks if each[2].marked_until]
            heapify(self._marks)

    def expire(self, now: float) -> None:
        self._now = max(self._now, now)
        for known in self.pins.expired(now):
            with self._changing(known):
                self.pins.remove(known)
        while self._marks and self._marks[0][0] <= now:
            _, stamp, known = heappop(self._marks)
            if known.marked_until > now:  # it was renewed
                heappush(self._marks, (known.marked_until, stamp, known))
            elif known.marked_until:
                with self._changing(known):
                    known.marked_s = known.marked_until = 0.0

    @contextmanager
    def _changing(self, known: CachedBlock) -> Iterator[None]:
        """Within this context the block has no place in the order."""
        is_idle, is_last = known.stamp > 0, known.is_last
        if is_idle:
            self.remove(known.block)
        yield
        if is_idle:
            self.add(known, is_followed=not is_last)

    def forgotten(self, known: CachedBlock) -> None:
        self.pins.remove(known)
        known.marked_until = 0.0

    def evicted(self, known: CachedBlock) -> None:
        if known.hash[0] % GHOST_SAMPLE == 0:
            self._ghosts[known.hash] = known.score if known.uses > 0 else None
            if len(self._ghosts) > self._most_ghosts:
                self._ghosts.popitem(last=False)

    def value(self, known: CachedBlock) -> int:
        if not self._is_used(known):
            return 0
        return int(2 ** ((self._place_of(known) - self._age) / ONE))

    def next(self) -> int:
        block = self._first_to_go()
        self._age += self._idle[block].width * self._half_lives
        return block

    def _first_to_go(self) -> int:
        heaps = [self._written, self._used, self._pinned]
        if self._num_used > self._most_used:
            heaps[:2] = self._used, self._written
        for heap in heaps:
            while heap and not self._counts(heap[0]):
                heappop(heap)
            if heap:
                return heap[0][2].block
        return next(iter(self._idle))  # all others are followed by blocks that sequences hold

    def renumber(self, num_blocks: int) -> None:
        self._idle = {known.block: known for known in self._idle.values()}
        self._set_size(num_blocks)

    def check_integrity(self) -> None:
        assert self._num_used == sum(map(self._is_used, self._idle.values()))
        assert all(block == known.block and known.stamp for block, known in self._idle.items())
        listed = {
            entry[2].block
            for entry in [*self._written, *self._used, *self._pinned]
            if self._counts(entry)
        }
        assert listed <= self._idle.keys(), "a held block may be evicted"

    def _set_size(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._most_used = int(MOST_KEPT * num_blocks)
        self._half_lives = max(1, ONE // (HALF_LIFE * num_blocks))  # that an eviction takes
        self._most_ghosts = GHOSTS_PER_BLOCK * num_blocks
        self.pins.set_size(num_blocks)

    def _new_stamp(self) -> int:
        self._num_stamps += 1
        return self._num_stamps

    def _count_use(self, known: CachedBlock, score: int | None) -> None:
        """Count one use more than those of a score; None: there were none."""
        known.score = self._age if score is None else together(score, self._age)
        known.uses = max(known.uses, 0) + 1

    def _place_of(self, known: CachedBlock) -> int:
        """The logarithm of what a used block is worth; 0 or less of another one."""
        score, uses = known.score, known.uses
        if known.marked_until:
            marked = self._age + log2_of(MARKED_USES)
            score = together(score, marked) if uses > 0 else marked
        elif uses <= 0:
            return uses
        return score + log2_of(known.worth)

    @staticmethod
    def _uses(known: CachedBlock) -> int:
        """How often a block counts as used."""
        return known.uses + MARKED_USES if known.marked_until else known.uses

    def _is_used(self, known: CachedBlock) -> bool:
        return self._uses(known) > 0 and not known.pinned_until

    @staticmethod
    def _counts(entry: Entry) -> bool:
        return entry[2].stamp == entry[1]
