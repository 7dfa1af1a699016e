"""MLX's cache of freed buffers and its Metal allocator. README.md names the source of each rule."""

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

PAGE = 16_384
NO_LIMIT = 1 << 60


class BufferCache:
    """Freed buffers by size. Equal sizes are used oldest first."""

    def __init__(self, page: int = PAGE) -> None:
        self.page = page
        self.size = 0
        self._by_size: list[tuple[int, int]] = []  # (bytes, number of its entry)
        self._by_age: OrderedDict[int, int] = OrderedDict()  # entry -> bytes, oldest first
        self._entries = count()

    def reuse(self, size: int) -> int | None:
        """Take the smallest buffer that is large enough and not too large; return its bytes."""
        place = bisect_left(self._by_size, (size, -1))
        if place == len(self._by_size):
            return None
        found, entry = self._by_size[place]
        if found >= min(2 * size, size + 2 * self.page):
            return None
        self._remove(place, entry)
        return found

    def recycle(self, size: int) -> None:
        entry = next(self._entries)
        insort(self._by_size, (size, entry))
        self._by_age[entry] = size
        self.size += size

    def release(self, least: int) -> int:
        """Give the oldest buffers back, `least` bytes or more; all, if that is most of them."""
        if least >= 0.9 * self.size:
            released, self.size = self.size, 0
            self._by_size.clear()
            self._by_age.clear()
            return released
        released = 0
        while released < least and self._by_age:
            entry, size = next(iter(self._by_age.items()))
            self._remove(bisect_left(self._by_size, (size, entry)), entry)
            released += size
        return released

    def _remove(self, place: int, entry: int) -> None:
        self.size -= self._by_size.pop(place)[0]
        del self._by_age[entry]


@dataclass
class Allocator:
    """The Metal allocator, in bytes.

    Attributes:
        cache_limit: of `mx.set_cache_limit`.
        gc_limit: 0.95 of the working set; above it a new buffer gives cached ones back first.
        active: of buffers in use.
        mapped: of all buffers that were made.
        reused: of all buffers that came from the cache.
        num_new: how many buffers were made.
        peak: the most that was active and cached together.
        peak_active: the most that was active.
        peak_cached: the most that was cached.
    """

    cache_limit: int = NO_LIMIT
    gc_limit: int = NO_LIMIT
    active: int = 0
    mapped: int = 0
    reused: int = 0
    num_new: int = 0
    peak: int = 0
    peak_active: int = 0
    peak_cached: int = 0

    def __post_init__(self) -> None:
        self.cache = BufferCache()

    def malloc(self, size: int) -> int:
        """Allocate; return the bytes of the buffer, which :meth:`free` takes."""
        if size > PAGE:
            size = -(-size // PAGE) * PAGE
        found = self.cache.reuse(size)
        if found is None:
            needed = self.active + self.cache.size + size
            if needed >= self.gc_limit:
                self.cache.release(needed - self.gc_limit)
            found = size
            self.mapped += size
            self.num_new += 1
        else:
            self.reused += found
        self.active += found
        self.peak_active = max(self.peak_active, self.active)
        self.peak = max(self.peak, self.active + self.cache.size)
        if self.cache.size > self.cache_limit:
            self.cache.release(self.cache.size - self.cache_limit)
        return found

    def free(self, size: int) -> None:
        self.active -= size
        if self.cache.size < self.cache_limit:
            self.cache.recycle(size)
            self.peak_cached = max(self.peak_cached, self.cache.size)
