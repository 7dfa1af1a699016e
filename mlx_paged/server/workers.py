"""The server's threads, and whether they answer. Knows no mlx."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mlx_paged.protocol.long_work import watched_by

PROBE_EVERY_S = 0.5
READY_S = 5.0  # without an answer, and /ready fails
HEALTHY_S = 60.0  # without an answer, and /health fails


class Workers(ThreadPoolExecutor):
    """Threads that note when one of them last ended a task, and how many do what may take long.

    Args:
        count: of the threads.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count, initializer=self._begin)
        self.num_long = 0
        self._count = count
        self._lock = threading.Lock()
        self._probe: Future[None] | None = None
        self._since = 0.0  # when the probe was sent, or a thread last ended a task

    def silence(self, now: float) -> float:
        """Seconds for which these threads have answered no probe and ended no task. A new probe
        is sent after each answer. Threads that do what may take long are no silence."""
        if self._probe is None or self._probe.done():
            self._since, self._probe = now, super().submit(self._ended)
        if self.num_long >= self._count:
            self._since = now
        return now - self._since

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future = super().submit(function, *args, **options)
        future.add_done_callback(lambda _: self._ended())
        return future

    def _ended(self) -> None:
        self._since = time.monotonic()

    def _begin(self) -> None:
        watched_by(self.change_long)

    def change_long(self, change: int) -> None:
        with self._lock:
            self.num_long += change
            self._since = time.monotonic()


class Probes:
    """Asks threads and engines again and again whether they answer.

    Args:
        workers: by the names of what they do.
        engines: returns a probe of each engine by its name, which returns when the engine answers.
    """

    def __init__(
        self,
        workers: Mapping[str, Workers],
        engines: Callable[[], Mapping[str, Callable[[], Awaitable[object]]]],
    ) -> None:
        self._workers, self._engines = workers, engines
        self._asked: dict[str, tuple[asyncio.Future[None], float]] = {}

    async def run(self) -> None:
        """Send probes. Runs until cancelled."""
        while True:
            self.silent(0.0)
            await asyncio.sleep(PROBE_EVERY_S)

    def silent(self, most: float) -> list[str]:
        """The names of the threads and engines that have not answered for so many seconds."""
        now, engines = time.monotonic(), self._engines()
        found = {name: each.silence(now) for name, each in self._workers.items()}
        self._asked = {name: asked for name, asked in self._asked.items() if name in engines}
        for name, probe in engines.items():
            if name not in self._asked or self._asked[name][0].done():
                self._asked[name] = asyncio.ensure_future(_answered(probe)), now
            found[f"the engine of {name}"] = now - self._asked[name][1]
        return [name for name, seconds in found.items() if seconds > most]


async def _answered(probe: Callable[[], Awaitable[object]]) -> None:
    try:
        await probe()
    except RuntimeError:  # an engine that has stopped is told of elsewhere
        return
