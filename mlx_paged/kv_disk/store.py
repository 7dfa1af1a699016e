"""DiskStore: writes and reads records on threads of its own. Knows no mlx."""

import errno
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Barrier, Lock, RLock
from time import monotonic
from typing import Any

import numpy as np

from mlx_paged.kv_disk.packs import NO_ORIGIN, Location, Origin, PackFiles, allow_disk

LOGGER = logging.getLogger(__name__)

READERS = 2
STAGING = 1 << 28
"""Bytes on their way to the disk that memory may hold, and as many on their way back."""
DAILY_WRITES = 5
"""In 24 hours at most this many times the size of the store is written."""
PAUSE = 60.0
"""Seconds without a write after one that failed."""
FADING = 0.8
"""Weight of a read in the measured speed, relative to the next one."""


class Load:
    """Records on their way into memory.

    Attributes:
        worths: what some of them are worth, by key.
        num_bytes: their payloads together.
        found: by key each record that arrived and can be trusted: a matrix of bytes, and the row of
            the matrix with its payload.
        seconds: how long the slowest reader took, when the load is done.
    """

    def __init__(self, keys: Sequence[bytes], num_bytes: int, worths: Mapping[bytes, int]) -> None:
        self.keys = frozenset(keys)
        self.worths = worths
        self.num_bytes = num_bytes
        self.found: dict[bytes, tuple[Any, int]] = {}
        self.futures: list[Future[None]] = []
        self.started = monotonic()
        self.seconds = 0.0
        # Held while the load is made: readers wait for it, since they would slow that down.
        self.gate = RLock()

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.futures)


class DiskStore:
    """Payloads by key, in packs. Of its methods only :meth:`close` waits for the disk.

    A record that cannot be trusted is not found; it is counted and removed. No failure of the disk
    is raised. When a store opens, a thread makes the index from the packs; the store can be used
    meanwhile.

    Args:
        packs: the store's own from here on.
        identity: 32 bytes. Only records that were written under this identity are found.
        make_rows: takes a number of payloads and the bytes of each. Returns memory for them twice:
            for the pool to read, and for numpy to fill.

    Attributes:
        staged_bytes: of payloads that are on their way to the disk.
        counts: as the keys of docs/metrics.md.
        dropped: records that were not trusted or not written, by reason.
    """

    def __init__(self, packs: PackFiles, identity: bytes, make_rows: Callable[..., Any]) -> None:
        names = "hits", "bytes_read", "bytes_written", "seconds_saved", "slower"
        self.counts: dict[str, float] = dict.fromkeys(names, 0)
        self.dropped: Counter[str] = Counter()
        self._identity = identity
        self._packs = packs
        self._make_rows = make_rows
        self._index: dict[bytes, Location] = {}
        self._pending: dict[bytes, Any] = {}  # on their way to the disk
        self.staged_bytes = 0
        self._lock = Lock()  # guards what several threads count
        self._written, self._day = 0, monotonic()
        self._resume = 0.0
        self._bytes, self._seconds = 0.0, 0.0  # of reads, the latest with most weight
        self._writer = ThreadPoolExecutor(1, "mlx_paged.kv_disk", allow_disk)
        self._readers = ThreadPoolExecutor(READERS, "mlx_paged.kv_disk", allow_disk)
        self._writer.submit(self._scan)
        start = Barrier(READERS)  # starts their threads now, not while a request waits for them
        wait([self._readers.submit(start.wait, 1.0) for _ in range(READERS)])

    def __contains__(self, key: object) -> bool:
        return key in self._index or key in self._pending

    def __len__(self) -> int:
        return len(self._index) + len(self._pending)

    def set_least(self, worth: int) -> None:
        """Set what content is worth that was never used. Called before anything is written."""
        self._packs.least = worth

    @property
    def is_writable(self) -> bool:
        """Whether no write failed just now."""
        return monotonic() >= self._resume

    @property
    def has_room(self) -> bool:
        """Whether :meth:`put` takes more now."""
        return self.staged_bytes < STAGING and self.is_writable

    def size_of(self, key: bytes) -> int:
        """Bytes of a payload; 0 if it is unknown or in memory still."""
        location = self._index.get(key)
        return location.num_bytes if location else 0

    def seconds_to_read(self, num_bytes: int) -> float:
        """What earlier reads predict; 0: unknown."""
        return self._seconds / self._bytes * num_bytes if self._bytes else 0.0

    def doubt(self) -> None:
        """Predict less from now on, so that a slow disk is tried again."""
        self._seconds *= 0.95

    def put(self, key: bytes, payload: Any, origin: Origin = NO_ORIGIN) -> None:
        """Write a payload soon, a buffer that does not change."""
        if key not in self and self.has_room:
            self._pending[key] = payload
            with self._lock:
                self.staged_bytes += len(payload)
            self._writer.submit(self._write, key, payload, origin)

    def load(self, keys: Sequence[bytes], worths: Mapping[bytes, int] | None = None) -> Load:
        """Start to read payloads. By key, `worths` are what they are worth."""
        counts = Counter[int]()  # payloads by size
        wanted: list[Any] = []  # each a key, its location or content, row among those of its size
        for key in keys:
            source: Any = self._index.get(key, self._pending.get(key))
            if source is not None:
                size = source.num_bytes if isinstance(source, Location) else len(source)
                wanted.append((key, source, counts[size]))
                counts[size] += 1
        rows = {size: self._make_rows(count, size) for size, count in counts.items()}
        load = Load(keys, sum(size * count for size, count in counts.items()), worths or {})
        stride = -(-len(wanted) // READERS) or 1
        with load.gate:
            for start in range(0, len(wanted) or 1, stride):
                task = self._readers.submit(self._read, load, wanted[start : start + stride], rows)
                load.futures.append(task)
        return load

    def note(self, load: Load, seconds_to_compute: float) -> None:
        """Count a load that is done, once, and learn from it how fast the disk is."""
        if not load.futures:
            return  # another request has waited for it too
        load.futures = []
        num_bytes = sum(rows.shape[1] for rows, _ in load.found.values())
        self.counts["hits"] += len(load.found)
        self.counts["bytes_read"] += num_bytes
        self.counts["seconds_saved"] += max(0.0, seconds_to_compute - load.seconds)
        self._bytes = FADING * self._bytes + num_bytes
        self._seconds = FADING * self._seconds + load.seconds

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything is written, or for some seconds."""
        wait([self._writer.submit(lambda: None)], timeout)

    def close(self) -> None:
        """Write what was given, and let others use the directory."""
        self._readers.shutdown()
        self._writer.shutdown()
        self._packs.close()

    # On the store's threads

    def _scan(self) -> None:
        index, live = dict[bytes, Location](), set[int]()
        for found in self._packs.scan():
            if isinstance(found, str):
                self.dropped[found] += 1
                continue
            live.add(found.location.pack)
            if found.identity == self._identity:
                index.setdefault(found.key, found.location)
        self._index = index
        for pack in self._packs.packs.keys() - live:
            with suppress(OSError):
                self._packs.remove(pack)
        self._written = self._packs.written_today

    def _write(self, key: bytes, payload: Any, origin: Origin) -> None:
        if monotonic() - self._day > 86400:
            self._written, self._day = 0, monotonic()
        self._written += len(payload)
        try:
            if self._written > DAILY_WRITES * self._packs.max_bytes:
                times = f"{DAILY_WRITES} times its size was written in 24 hours"
                self._give_up("budget", f"{times}: no more is written until these have passed")
            elif not self._packs.has_room(len(payload), origin):
                self.dropped["background" if origin.is_background else "worth"] += 1
            elif self.is_writable:
                location, removed = self._packs.append(self._identity, key, payload, origin)
                self._index[key] = location
                self.counts["bytes_written"] += location.num_bytes
                for old, (pack, *_) in list(self._index.items()) if removed else ():
                    if pack in removed:
                        self._index.pop(old, None)
        except OSError as error:
            reason = "full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "unwritable"
            again = f"a write is tried again every {PAUSE:g} s"
            self._give_up(reason, f"{error.strerror}: {again} and not reported again")
            self._resume = monotonic() + PAUSE
        finally:
            del self._pending[key]
            with self._lock:
                self.staged_bytes -= len(payload)

    def _give_up(self, reason: str, problem: str) -> None:
        """Count a record that is not written; tell the log of the first one of each reason."""
        if not self.dropped[reason]:
            LOGGER.warning("K/V on disk %s: %s", self._packs.directory, problem)
        self.dropped[reason] += 1

    def _read(self, load: Load, wanted: Sequence[Any], rows: dict[int, Any]) -> None:
        with load.gate:
            started, memory = monotonic(), {size: pair[1] for size, pair in rows.items()}
        stored = [each for each in wanted if isinstance(each[1], Location)]
        for key, payload, row in wanted:
            if not isinstance(payload, Location):
                memory[len(payload)][row] = np.frombuffer(payload, np.uint8)
                load.found[key] = rows[len(payload)][0], row
        reasons = self._packs.read(stored, memory, self._identity)
        for (key, location, row), reason in zip(stored, reasons, strict=True):
            if reason is None:
                load.found[key] = rows[location.num_bytes][0], row
            elif self._index.get(key) == location:
                with self._lock:
                    self._index.pop(key, None)
                    self.dropped[reason] += 1
                self._writer.submit(self._packs.kill, location)
        load.seconds = max(load.seconds, monotonic() - started)
        values = dict.fromkeys((location.pack for _, location, *_ in stored), 0)
        for key, location, _ in stored:
            values[location.pack] += load.worths.get(key, 0) * location.num_bytes
        self._writer.submit(self._packs.used, set(values), values)
