"""Lets an engine give memory back while the system is short of it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakMethod

from mlx_paged.engine.models import EngineParts
from mlx_paged.engine.pipeline import StepPipeline
from mlx_paged.engine.pool_size import PoolSize
from mlx_paged.kv.limits import HeldLimits
from mlx_paged.pressure.rungs import watch
from mlx_paged.pressure.system import System
from mlx_paged.pressure.system import system as this_system
from mlx_paged.pressure.watch import Watch
from mlx_paged.request import Request


def watch_memory(
    pipeline: StepPipeline[Any],
    parts: EngineParts,
    unended: Callable[[], Iterable[Request]],
    system: System | None = None,
    **options: Any,
) -> Watch | None:
    """Watch an engine's memory in the pauses of its pipeline. None: the system tells nothing.

    Args:
        unended: returns all requests that have not ended.
        system: tells of its memory; None: this machine's, if it does.
        options: those of :func:`mlx_paged.pressure.rungs.watch`.
    """
    system = system or this_system()
    if system is None:
        return None
    scheduler, models, size = parts.scheduler, parts.models, None
    runner, copy_when_idle = models.runner, WeakMethod(pipeline.copy_when_idle)
    if (arrays := models.resizable) is not None:
        size = PoolSize(scheduler, arrays, parts.stats, unended, models.follow)

    def forget_kept() -> bool:
        had_any = scheduler.forget_kept()
        runner.release(scheduler.take_released(), scheduler.take_rested())
        return had_any

    def save() -> bool:  # the pipeline has the watch: a cycle would keep the pool alive
        copy = copy_when_idle()
        return copy is not None and copy()

    pipeline.pause = found = watch(
        system,
        [forget_kept, models.pooled.runner.forget_kept],
        scheduler,
        size,
        save,
        _Wired(models.limits),
        **options,
    )
    parts.stats.pressure = found.report
    return found


class _Wired:
    """The wired limits that an engine's pools hold."""

    def __init__(self, limits: Sequence[HeldLimits]) -> None:
        self._limits = limits

    def rest(self) -> None:
        for each in self._limits:
            each.rest()

    def work(self) -> None:
        for each in self._limits:
            each.work()
