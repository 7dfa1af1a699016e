"""Engines that live one after the other on one directory of stored K/V, which may be damaged."""

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv_disk import opening, packs, tier
from mlx_paged.kv_disk.packs import PackFiles
from mlx_paged.kv_disk.store import DiskStore, Load
from mlx_paged.kv_disk.tier import KVDiskTier

IDENTITY = bytes(range(32))
Rows = Callable[[int, int], tuple[Any, Any]]


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

    def __init__(self, files: PackFiles, identity: bytes, rows: Rows, rng: random.Random) -> None:
        self._rng = rng
        super().__init__(files, identity, rows)
        self._writer.shutdown()
        self._readers.shutdown()
        self._writer = self._readers = Inline()  # type: ignore[assignment]

    def load(self, keys: Any, worths: Any = None) -> Load:
        load = super().load(keys, worths)
        load.futures.append(Delay(self._rng))
        return load


class Disk:
    """The directory as one life has it.

    Attributes:
        tier: that was opened.
    """

    def __init__(self, directory: Path, max_bytes: int, rng: random.Random) -> None:
        self.directory, self._max_bytes, self._rng = directory, max_bytes, rng
        self.tier: KVDiskTier | None = None

    def open(self, allocator: BlockAllocator) -> KVDiskTier:
        """For the model of hashes."""
        store = self._store(
            self._files(), IDENTITY, lambda *sizes: (np.zeros(sizes, np.uint8),) * 2
        )
        sizes = [24 * allocator.block_size * group.width for group in allocator.groups]
        return self._open(store, allocator, None, sizes)

    def for_engines(self) -> AbstractContextManager[Any]:
        """While this is entered, engines with a `kv_disk` get this one."""
        made = {"PackFiles": self._files, "DiskStore": self._store, "KVDiskTier": self._open}
        return patch.multiple(opening, **made)

    def _files(self, *given: Any) -> PackFiles:
        files = PackFiles(self.directory, self._max_bytes)
        files._pack_bytes = self._rng.choice((500, 5000, 10**6))
        return files

    def _store(self, files: PackFiles, identity: bytes, rows: Rows) -> SlowStore:
        return SlowStore(files, identity, rows, self._rng)

    def _open(
        self, store: DiskStore, allocator: BlockAllocator, predict: object, sizes: list[int]
    ) -> KVDiskTier:
        tier.STEP_BYTES = self._rng.choice((1, 200, 1000, 10**6))
        seconds = self._rng.choice((0.0, 0.0, 1e-9, 1.0))
        self.tier = KVDiskTier(store, allocator, lambda start, stop: seconds, sizes)
        return self.tier


class Life(Protocol):
    """A simulation; see simulated_engine.py."""

    counts: Counter[str]

    def run(self) -> None: ...

    def result(self) -> Counter[str]: ...


class DiskLives:
    """Several simulations, each with a new engine and pool on the directory of the ones before."""

    def __init__(self, make: Callable[..., Life], name: str) -> None:
        self.counts: Counter[str] = Counter(schedules=1)
        self._make, self._name = make, name
        self._rng = random.Random(f"{name}:disk")
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
        disk = Disk(self._directory, self._max_bytes, self._rng)
        life = self._make(self._name, f":{number}", disk)
        life.calls.histories = self._histories  # type: ignore[attr-defined]
        try:
            life.run()
        finally:
            counts = life.result()
            counts["schedules"] = 0
            self.counts += counts
            if disk.tier is not None:
                store: Any = disk.tier.store
                self.counts["stored"] += store.counts["bytes_written"] > 0
                self.counts["fetched"] += store.counts["hits"]
                self.counts["dropped"] += store.dropped.total()
                store._packs.close()
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
