"""A pool whose size changes between steps, by chance."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from mlx_paged.engine.pool_size import PoolSize


class RandomSizes:
    """Changes the pool's size now and then. A simulation with it knows the size at present.

    Args:
        simulation: of an engine, which has not begun.
    """

    def __init__(self, simulation: Any, rng: random.Random) -> None:
        self._simulation, self._rng = simulation, rng
        engine = simulation.engine
        follows = {"follow": engine._models.follow} if hasattr(engine, "_models") else {}
        self.size = PoolSize(
            engine.scheduler, engine.runner, engine.stats, engine._requests.values, **follows
        )
        self._is_due = False
        self._counts: Counter[str] = simulation.counts
        engine._pipeline.pause = self

    def is_due(self) -> bool:
        self._is_due |= self._rng.random() < 0.15
        return self._is_due

    def run(self) -> None:
        assert self._is_due
        self._is_due = False
        before, held = self.size.now, self._simulation.engine.scheduler.blocks_in_use
        if not self.size.change(self._rng.choice((1, held, self._rng.randint(1, before), 1 << 30))):
            return
        self._counts["shrinks" if self.size.now < before else "growths"] += 1
        self._simulation.engine.scheduler.allocator.check_integrity()
        setting = replace(self._simulation.setting, num_blocks=self.size.now)
        self._simulation.setting = setting

    def rest(self) -> None:
        pass
