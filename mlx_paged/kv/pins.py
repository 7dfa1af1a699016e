"""What clients ask to keep of the known content, and for how long. Knows no mlx."""

from collections import Counter
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from mlx_paged.kv.cached_block import CachedBlock

MOST_PINNED = 0.5
"""The part of the pool that all owners together may pin: an owner may use many salts."""


class Pinned(NamedTuple):
    """What came of a wish to keep a text.

    Attributes:
        tokens: leading tokens of the text that are kept.
        reason: why no more are: "max_pinned", the owner's share of the pool is full; "pool", the
            share of all owners is; "not_cached", no more is known. None: all are kept.
    """

    tokens: int
    reason: str | None = None


class Pins:
    """Counts the blocks that each owner keeps, and finds the pins whose time is over. The owner of
    a block is the root of its text, which tells salts apart.

    Args:
        share: the part of the pool that one owner may pin.
    """

    def __init__(self, num_blocks: int, share: float) -> None:
        self.share = share
        self.set_size(num_blocks)
        self._num_blocks = 0
        self._blocks: Counter[bytes] = Counter()  # by owner
        self._ends: list[tuple[float, int, CachedBlock]] = []
        self._num_ends = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that are pinned."""
        return self._num_blocks

    def set_size(self, num_blocks: int) -> None:
        """Count for a pool of `num_blocks` blocks; what is pinned stays pinned."""
        self._most_of_owner = int(self.share * num_blocks)
        self._most = int(MOST_PINNED * num_blocks)

    def refuses(self, known: CachedBlock) -> str | None:
        """Why a block cannot be pinned; None: it can."""
        if known.pinned_until:
            return None
        if self._blocks[known.root] + known.width > self._most_of_owner:
            return "max_pinned"
        return "pool" if self.num_blocks + known.width > self._most else None

    def add(self, known: CachedBlock, until: float) -> None:
        """Pin a block, or renew its pin."""
        if not known.pinned_until:
            self._blocks[known.root] += known.width
            self._num_blocks += known.width
        known.pinned_until = until
        self._num_ends += 1
        heappush(self._ends, (until, self._num_ends, known))
        if len(self._ends) > 2 * self.num_blocks + 64:
            self._ends = [each for each in self._ends if each[2].pinned_until == each[0]]
            heapify(self._ends)

    def remove(self, known: CachedBlock) -> None:
        """The block is pinned no more."""
        if known.pinned_until:
            known.pinned_until = 0.0
            self._blocks[known.root] -= known.width
            self._num_blocks -= known.width
            if not self._blocks[known.root]:
                del self._blocks[known.root]

    def expired(self, now: float) -> list[CachedBlock]:
        """The blocks whose pin has ended by `now`. They count until they are removed."""
        ended = []
        while self._ends and self._ends[0][0] <= now:
            until, _, known = heappop(self._ends)
            if known.pinned_until == until:
                ended.append(known)
        return ended
