"""Engines that live one after the other on one directory of stored K/V, which may be damaged."""

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv_disk import packs, tier
from mlx_paged.kv_disk.packs import PackFiles
from mlx_paged.kv_disk.store import DiskStore, Load
from mlx_paged.kv_disk.tier import KVDiskTier

IDENTITY = bytes(range(32))


class Inline:
    """An executor that runs each task at once, as a thread of the store would."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        before = getattr(packs._thread, "may_wait", False)
        packs.allow_disk()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
            raise
        finally:
            packs._thread.may_wait = before
        return future

    def shutdown(self) -> None:
        pass


class Delay(Future[None]):
    """Is done when it is asked for the second time or later, by chance."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.polls = 0

    def done(self) -> bool:
        self.polls += 1
        return self.polls > 1 and self.rng.random() < 0.4


class SlowStore(DiskStore):
    """A store without threads, whose loads take a random number of steps."""

    def __init__(self, files: PackFiles, identity: bytes, rng: random.Random) -> None:
        self._rng = rng
        self._delayed: list[Any] = []
        super().__init__(files, identity, lambda *sizes: (np.zeros(sizes, np.uint8),) * 2)
        self._writer.shutdown()
        self._readers.shutdown()
        self._writer = self._readers = Inline()  # type: ignore[assignment]

    def load(self, keys: Any) -> Load:
        load = super().load(keys)
        load.futures.append(Delay(self._rng))
        return load


class Life(Protocol):
    """A simulation; see simulation.py."""

    counts: Counter[str]

    def run(self) -> None: ...

    def result(self) -> Counter[str]: ...


class DiskLives:
    """Several simulations, each with a new engine and pool on the directory of the ones before."""

    def __init__(self, make: Callable[..., Life], seed: int, index: int) -> None:
        self.counts: Counter[str] = Counter(schedules=1)
        self._make, self._seed, self._index = make, seed, index
        self._rng = random.Random(f"{seed}:{index}:disk")
        self._directory = Path(tempfile.mkdtemp(prefix="kv_disk"))
        self._max_bytes = self._rng.choice((3000, 20_000, 10**8))
        self._histories: list[Any] = []
        tier.WAIT = 0.0

    def run(self) -> None:
        try:
            for life in range(self._rng.randint(2, 4)):
                self._live(life)
                self._damage()
        finally:
            shutil.rmtree(self._directory)

    def result(self) -> Counter[str]:
        return self.counts

    def _live(self, number: int) -> None:
        rng = self._rng
        opened: list[KVDiskTier] = []

        def open_tier(allocator: BlockAllocator) -> KVDiskTier:
            files = PackFiles(self._directory, self._max_bytes)
            files._pack_bytes = rng.choice((500, 5000, 10**6))
            store = SlowStore(files, IDENTITY, rng)
            sizes = [24 * allocator.block_size * group.width for group in allocator.groups]
            tier.STEP_BYTES = rng.choice((1, 200, 1000, 10**6))
            seconds = rng.choice((0.0, 0.0, 1e-9, 1.0))
            opened.append(KVDiskTier(store, allocator, lambda start, stop: seconds, sizes))
            return opened[-1]

        life = self._make(self._seed, self._index, f":{number}", open_tier)
        life.calls.histories = self._histories  # type: ignore[attr-defined]
        try:
            life.run()
        finally:
            counts = life.result()
            counts["schedules"] = 0
            self.counts += counts
            for each in opened:
                self.counts["stored"] += each.store.counts["bytes_written"] > 0
                self.counts["fetched"] += each.store.counts["hits"]
                self.counts["dropped"] += each.store.dropped.total()
                each.store._packs.close()
        self.counts["lives"] += 1

    def _damage(self) -> None:
        """Now and then change, cut or delete a pack."""
        files = sorted(self._directory.glob("*.kv"))
        if not files or self._rng.random() < 0.5:
            return
        path = self._rng.choice(files)
        content = bytearray(path.read_bytes())
        position = self._rng.randrange(len(content))
        kind = self._rng.choice(("flip", "cut", "delete", "zeros"))
        if kind == "flip":
            content[position] ^= 1 << self._rng.randrange(8)
        elif kind == "cut":
            del content[position:]
        elif kind == "zeros":
            content[position : position + 64] = bytes(len(content[position : position + 64]))
        path.write_bytes(content)
        if kind == "delete":
            path.unlink()
