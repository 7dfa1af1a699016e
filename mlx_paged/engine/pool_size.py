"""How large an engine's pool is: it changes between steps. Knows no mlx."""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.request import Request
from mlx_paged.scheduler.scheduler import Scheduler

LOGGER = logging.getLogger(__name__)


class Arrays(Protocol):
    """The arrays of a pool."""

    def resize(self, num_blocks: int, kept: Int32Array | None = None) -> None:
        """Let the pool have `num_blocks`. The blocks `kept`, or all blocks, are the first of
        them; their content stays. May raise if memory runs out."""

    def renew(self, num_blocks: int) -> None:
        """Make the arrays anew after :meth:`resize` has failed: their content is lost."""


class PoolSize:
    """Changes the size of a pool, and of a pool beside it, while no step is under way. No
    request ends because of it, and no token changes: what loses its blocks is computed again.

    Args:
        arrays: of the scheduler's pool.
        follow: called with the new number of blocks, which another pool follows.
        unended: returns all requests that have not ended.

    Attributes:
        largest: the size at the start, to which the pool may return.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        arrays: Arrays,
        stats: EngineStats,
        unended: Callable[[], Iterable[Request]],
        follow: Callable[[int], None] = lambda num_blocks: None,
    ) -> None:
        self._scheduler = scheduler
        self._arrays = arrays
        self._stats = stats
        self._unended = unended
        self._follow = follow
        self.largest = stats.num_blocks

    @property
    def now(self) -> int:
        return self._stats.num_blocks

    @property
    def held(self) -> int:
        """Blocks that running requests hold, and need for their next tokens."""
        return self._scheduler.blocks_needed

    @property
    def least(self) -> int:
        """The smallest size at present: every request that has not ended fits in alone."""
        return self._scheduler.least_blocks(self._unended())

    def change(self, num_blocks: int) -> bool:
        """Let the pool have `num_blocks`, but not more than at the start and not too few; returns
        whether the size has changed."""
        num_blocks = min(self.largest, max(self.least, num_blocks))
        if num_blocks == self.now:
            return False
        kept = None
        if num_blocks < self.now:
            kept = self._scheduler.shrink(num_blocks)
        else:
            self._scheduler.grow(num_blocks)
        self._stats.num_blocks = num_blocks
        try:
            self._arrays.resize(num_blocks, kept)
            self._follow(num_blocks)
        except Exception:
            LOGGER.exception("the pool could not be changed to %d blocks: made anew", num_blocks)
            self._scheduler.recover([])
            self._arrays.renew(num_blocks)
        return True
