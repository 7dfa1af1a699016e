"""DiskStore: writes and reads records on threads of its own. Knows no mlx."""

import errno
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from io import FileIO
from time import monotonic
from typing import Any

from mlx_paged.kv_disk.packs import DamagedError, Location, PackFiles, allow_disk

READERS = 4
STAGING = 1 << 28
"""Bytes on their way to the disk, and as many on their way back, that memory may hold."""
DAILY_WRITES = 5
"""Times the size of the store that are written in 24 hours at most."""
PAUSE = 60.0
"""Seconds without a write after one that failed."""
FADING = 0.8
"""Weight of a read in the measured speed, relative to the next one."""


class Load:
    """Records on their way into memory.

    Args:
        worth: seconds that it takes to compute their tokens; 0: unknown.

    Attributes:
        num_bytes: their payloads together.
        found: those that arrived and can be trusted.
    """

    def __init__(self, keys: Sequence[bytes], num_bytes: int, worth: float) -> None:
        self.keys = frozenset(keys)
        self.num_bytes = num_bytes
        self.worth = worth
        self.is_noted = False
        self.found: dict[bytes, Any] = {}
        self.futures: list[Future[None]] = []
        self.started = self.ended = monotonic()

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.futures)


class DiskStore:
    """Payloads by key, in packs. No method waits for the disk but :meth:`close`.

    A record that cannot be trusted is not found, counted and removed; no failure of the disk is
    raised. The index is made of the packs when a store opens, while others use it already.

    Args:
        packs: it writes and reads these from here on.
        identity: 32 bytes: only records that were written under it are found.

    Attributes:
        counts: ``hits`` (records), ``bytes_read``, ``bytes_written``.
        dropped: records that were not trusted or not written, by reason.
        seconds_saved: to compute the tokens that were read, less the time to read them.
    """

    def __init__(self, packs: PackFiles, identity: bytes) -> None:
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.seconds_saved = 0.0
        self._identity = identity
        self._packs = packs
        self._index: dict[bytes, Location] = {}
        self._pending: dict[bytes, Any] = {}  # on their way to the disk
        self._staged = 0
        self._budget = DAILY_WRITES * packs.max_bytes
        self._written, self._day = 0, monotonic()
        self._resume = 0.0
        self._bytes, self._seconds = 0.0, 0.0  # of reads, the latest with most weight
        name = "mlx_paged.kv_disk"
        self._writer = ThreadPoolExecutor(1, name, allow_disk)
        self._readers = ThreadPoolExecutor(READERS, name, allow_disk)
        self._writer.submit(self._scan)

    def __contains__(self, key: object) -> bool:
        return key in self._index or key in self._pending

    def __len__(self) -> int:
        return len(self._index) + len(self._pending)

    @property
    def has_room(self) -> bool:
        """Whether :meth:`put` takes more now."""
        return self._staged < STAGING and self.is_writable

    @property
    def is_writable(self) -> bool:
        """Whether no write failed just now."""
        return monotonic() >= self._resume

    def size_of(self, key: bytes) -> int:
        """Bytes of a payload; 0 if it is unknown or in memory still."""
        place = self._index.get(key)
        return place.num_bytes if place else 0

    def seconds_to_read(self, keys: Sequence[bytes]) -> float:
        """What earlier reads predict; 0 before the first."""
        return self._seconds / self._bytes * sum(map(self.size_of, keys)) if self._bytes else 0.0

    def put(self, copied: Sequence[tuple[bytes, Sequence[Any]]]) -> None:
        """Write payloads, soon: keys and parts that the caller does not change."""
        new = [(key, parts) for key, parts in copied if key not in self]
        if new and self.has_room:
            self._pending |= new
            self._staged += sum(len(part) for _, parts in new for part in parts)
            self._writer.submit(self._write_all, new)

    def load(self, keys: Sequence[bytes], worth: float = 0.0) -> Load:
        """Start to read payloads."""
        load = Load(keys, sum(map(self.size_of, keys)), worth)
        stride = -(-len(keys) // READERS)
        for start in range(0, len(keys), stride):
            task = self._readers.submit(self._read, load, keys[start : start + stride])
            load.futures.append(task)
        return load

    def note(self, load: Load) -> None:
        """Learn from a load that is done how fast the disk is, once."""
        if load.is_noted:
            return
        load.is_noted, seconds = True, load.ended - load.started
        self.seconds_saved += max(0.0, load.worth - seconds) if load.found else 0.0
        num_bytes = sum(map(len, load.found.values()))
        self.counts["hits"] += len(load.found)
        self.counts["bytes_read"] += num_bytes
        self._bytes = FADING * self._bytes + num_bytes
        self._seconds = FADING * self._seconds + seconds

    def metrics(self) -> dict[str, Any]:
        """Counters and levels as plain JSON values."""
        names = ("hits", "bytes_read", "bytes_written")
        return {name: self.counts[name] for name in names} | {
            "seconds_saved": self.seconds_saved,
            "dropped": dict(self.dropped),
            "records": len(self),
        }

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
            identity, key, place = found
            live.add(place.pack)
            if identity == self._identity:
                index.setdefault(key, place)
        self._index = index
        for number in self._packs.packs.keys() - live:
            with suppress(OSError):
                self._packs.remove(number)
        self._written = self._packs.written_today()

    def _write_all(self, new: Sequence[tuple[bytes, Sequence[Any]]]) -> None:
        for key, parts in new:
            num_bytes = sum(map(len, parts))
            try:
                if self._may_write(num_bytes):
                    self._write(key, parts[0] if len(parts) == 1 else b"".join(parts))
            except OSError as error:
                self.dropped["full" if error.errno == errno.ENOSPC else "unwritable"] += 1
                self._resume = monotonic() + PAUSE
            finally:
                del self._pending[key]
                self._staged -= num_bytes

    def _write(self, key: bytes, payload: Any) -> None:
        place, removed = self._packs.append(self._identity, key, payload)
        self._index[key] = place
        self.counts["bytes_written"] += place.num_bytes
        for old, (pack, *_) in list(self._index.items()) if removed else ():
            if pack in removed:
                del self._index[old]

    def _may_write(self, num_bytes: int) -> bool:
        if not self.is_writable:
            return False
        if monotonic() - self._day > 86400:
            self._written, self._day = 0, monotonic()
        self._written += num_bytes
        if self._written > self._budget:
            self.dropped["budget"] += 1
        return self._written <= self._budget

    def _read(self, load: Load, keys: Sequence[bytes]) -> None:
        packs: dict[int, FileIO] = {}  # that are open
        for key in keys:
            place, parts = self._index.get(key), self._pending.get(key)
            if parts is not None:
                load.found[key] = b"".join(parts)
            elif place is not None:
                try:
                    load.found[key] = self._packs.read(place, self._identity, key, packs)
                except DamagedError as error:
                    self._drop(key, place, str(error))
        load.ended = monotonic()
        for file in packs.values():
            file.close()
        self._writer.submit(self._packs.used, set(packs))

    def _drop(self, key: bytes, place: Location, reason: str) -> None:
        if self._index.get(key) == place:
            del self._index[key]
            self.dropped[reason] += 1
            self._writer.submit(self._packs.kill, place)
