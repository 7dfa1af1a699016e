"""The order that pools of blocks usually have, to compare with."""

from collections import OrderedDict
from collections.abc import Iterator

from mlx_paged.kv.cached_block import CachedBlock


class LeastRecentlyUsed:
    """Evicts the block that is idle longest; blocks of one text become idle from its end."""

    def __init__(self, num_blocks: int) -> None:
        self._idle: OrderedDict[int, CachedBlock] = OrderedDict()
        self.num_pinned = 0

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        return iter(self._idle)

    def __contains__(self, block: object) -> bool:
        return block in self._idle

    def registered(self, known: CachedBlock, before: CachedBlock | None) -> None:
        pass

    def used(self, known: CachedBlock, before: CachedBlock | None) -> None:
        pass

    def add(self, known: CachedBlock, is_followed: bool) -> None:
        self._idle[known.block] = known

    def remove(self, block: int) -> None:
        del self._idle[block]

    def last_of_its_text(self, known: CachedBlock) -> None:
        pass

    def give_up(self, known: CachedBlock) -> None:
        if known.block in self._idle:
            self._idle.move_to_end(known.block, last=False)

    def pin(self, known: CachedBlock, until: float) -> str | None:
        return "lru"

    @property
    def has_ends(self) -> bool:
        return False

    def mark(self, known: CachedBlock, seconds: float, now: float) -> None: ...

    def expire(self, now: float) -> None:
        pass

    def forgotten(self, known: CachedBlock) -> None:
        pass

    def evicted(self, known: CachedBlock) -> None:
        pass

    def value(self, known: CachedBlock) -> int:
        return 0

    def next(self) -> int:
        return next(iter(self._idle))

    def renumber(self, num_blocks: int) -> None:
        self._idle = OrderedDict((known.block, known) for known in self._idle.values())

    def check_integrity(self) -> None:
        assert all(block == known.block for block, known in self._idle.items())
