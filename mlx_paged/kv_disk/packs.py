"""Append-only files of checked records: packs. Their functions wait for the disk. Knows no mlx."""

import errno
import fcntl
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from time import time
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

FILE_MAGIC = b"mlx_paged K/V 2\n"
"""First bytes of a pack; they name the version of the format."""
RECORD, DEAD = b"KVrc", b"dead"
HEADER = Struct("<4sI32s24sQIQ")
"""Magic, CRC of the rest of the header, identity, key, and the payload's bytes, CRC and sum."""
PACKS = 64
"""A full store has about so many packs: the store gives up one at a time."""
MIN_PACK, MAX_PACK = 1 << 20, 1 << 28
MIN_FREE = 0.05
"""Part of the disk that stays free."""
READ_BYTES = 1 << 23
"""Neighbouring records are read together, about so many bytes at once."""

_thread = threading.local()


def allow_disk() -> None:
    """Let this thread wait for the disk. Threads of the store do, an engine's thread never does."""
    _thread.may_wait = True


def _check_thread() -> None:
    assert getattr(_thread, "may_wait", False), "a disk call on a thread that must not wait"


class DamagedError(Exception):
    """A record that cannot be trusted; its argument says why in a word."""


class Location(NamedTuple):
    """Where a record is; `num_bytes` are those of its payload."""

    pack: int
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + HEADER.size + self.num_bytes


def checksums(payload: Any) -> tuple[int, int]:
    """A CRC of 32 bits and the sum of all whole 64-bit words."""
    words = np.frombuffer(payload, np.uint64, len(payload) // 8)
    return zlib.crc32(payload), int(words.sum(dtype=np.uint64))


def parsed(header: Any) -> tuple[bytes, bytes, bytes, int, int, int]:
    """Magic, identity, key, and the payload's bytes, CRC and sum.

    Raises:
        DamagedError: the header is short or wrong.
    """
    if len(header) < HEADER.size:
        raise DamagedError("truncated")
    magic, check, *values = HEADER.unpack(header)
    if magic not in (RECORD, DEAD) or zlib.crc32(header[8:]) != check:
        raise DamagedError("header")
    return magic, *values


def _checked(record: Any, place: Location, identity: bytes, key: bytes) -> Any:
    """The payload of a record if it is what was written under this key, else a reason."""
    try:
        magic, *names, size, crc, total = parsed(record[: HEADER.size])
    except DamagedError as error:
        return str(error)
    if magic != RECORD or names != [identity, key] or size != place.num_bytes:
        return "another"
    payload = record[HEADER.size :]
    if len(payload) < size:
        return "truncated"
    return payload if checksums(payload) == (crc, total) else "checksum"


class PackFiles:
    """The packs of a directory, at most `max_bytes` in all.

    One process uses a directory at a time. Only :meth:`append` makes files; a pack is never changed
    but for marks of dead records.

    Attributes:
        packs: bytes of each pack by its number, the one unused longest first.

    Raises:
        ValueError: another engine uses the directory, or it cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self._pack_bytes = min(MAX_PACK, max(MIN_PACK, max_bytes // PACKS))
        self.packs: OrderedDict[int, int] = OrderedDict()
        self._last: int | None = None  # the pack to append to
        known = f"[Engine] kv_disk is {str(directory)!r}"
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            lock = _private(self.directory / "lock", os.O_RDWR)
        except OSError as error:
            raise ValueError(
                f"{known} ({error.strerror}): expected a directory that can be written"
            ) from error
        self._unlock = finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            user = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
            self._unlock()
            raise ValueError(
                f"{known}, which process {user} uses: expected a directory of its own"
            ) from error
        os.pwrite(lock, f"{os.getpid():<20}".encode(), 0)

    @property
    def num_bytes(self) -> int:
        return sum(self.packs.values())

    def path(self, pack: int) -> Path:
        return self.directory / f"{pack:08}.kv"

    def written_today(self) -> int:
        """Bytes of the packs that were written in the last 24 hours, as their times say."""
        _check_thread()
        times = {pack: self.path(pack).stat().st_mtime for pack in self.packs}
        return sum(self.packs[pack] for pack, then in times.items() if then > time() - 86400)

    def scan(self) -> Iterator[tuple[bytes, bytes, Location] | str]:
        """Every record as its identity, key and place, newest pack first; of damage the reason."""
        _check_thread()
        found = []
        for path in self.directory.glob("*.kv"):
            if path.stem.isdecimal() and path == self.path(int(path.stem)):
                status = path.stat()
                found.append((status.st_atime, int(path.stem), status.st_size))
        self.packs.update((pack, size) for _, pack, size in sorted(found))
        for pack, size in reversed(list(self.packs.items())):
            try:
                yield from self._records(pack, size)
            except DamagedError as error:
                yield str(error)
            except OSError:
                yield "unreadable"

    def _records(self, pack: int, num_bytes: int) -> Iterator[tuple[bytes, bytes, Location]]:
        with self.path(pack).open("rb", buffering=0) as file:
            if file.read(len(FILE_MAGIC)) != FILE_MAGIC:
                raise DamagedError("format")
            place = Location(pack, len(FILE_MAGIC), 0)
            while place.offset < num_bytes:
                header = os.pread(file.fileno(), HEADER.size, place.offset)
                magic, identity, key, size, *_ = parsed(header)
                place = place._replace(num_bytes=size)
                if place.end > num_bytes:
                    raise DamagedError("truncated")
                if magic == RECORD:
                    yield identity, key, place
                place = Location(pack, place.end, 0)

    def append(self, identity: bytes, key: bytes, payload: Any) -> tuple[Location, list[int]]:
        """Write a record; returns its place and the packs that were given up for it.

        Raises:
            OSError: it cannot be written, or the disk would be too full.
        """
        _check_thread()
        size = HEADER.size + len(payload)
        disk = os.statvfs(self.directory)
        left = disk.f_bavail * disk.f_frsize - size
        if size > self.max_bytes or left < MIN_FREE * disk.f_blocks * disk.f_frsize:
            raise OSError(errno.ENOSPC, "the disk is too full")
        if self._last is None or self.packs[self._last] + size > self._pack_bytes:
            pack = max(self.packs, default=0) + 1
            file = _private(self.path(pack), os.O_WRONLY | os.O_EXCL)
            self.packs[pack], self._last = 0, pack
        else:
            pack = self._last
            file = os.open(self.path(pack), os.O_WRONLY)
        removed = []
        while self.num_bytes + size > self.max_bytes and (oldest := next(iter(self.packs))) != pack:
            removed.append(oldest)
            self.remove(oldest)
        rest = HEADER.pack(RECORD, 0, identity, key, len(payload), *checksums(payload))[8:]
        parts = [RECORD, zlib.crc32(rest).to_bytes(4, "little"), rest, payload]
        try:
            if not self.packs[pack]:
                self.packs[pack] = os.write(file, FILE_MAGIC)
            place = Location(pack, self.packs[pack], len(payload))
            if os.pwritev(file, parts, place.offset) != size:
                raise OSError(errno.ENOSPC, "the disk is full")
        except OSError:
            self._last = None  # what comes after a torn record is not found again
            raise
        finally:
            os.close(file)
        self.packs[pack] = place.end
        return place, removed

    def read(
        self, wanted: Sequence[tuple[bytes, Location]], identity: bytes
    ) -> Iterator[tuple[bytes, Any]]:
        """Records by their keys: each key with its payload, ``[num_bytes]`` uint8, or with the
        reason why it is not what was written under this key. Neighbours are read at once."""
        _check_thread()
        start = 0
        while start < len(wanted):
            first, stop = wanted[start][1], start + 1
            while stop < len(wanted) and (
                wanted[stop][1][:2] == (first.pack, wanted[stop - 1][1].end)
                and wanted[stop][1].end - first.offset <= READ_BYTES
            ):
                stop += 1
            content: Any = np.empty(wanted[stop - 1][1].end - first.offset, np.uint8)
            try:
                with self.path(first.pack).open("rb", buffering=0) as file:
                    count = os.preadv(file.fileno(), [content], first.offset)
            except OSError:
                yield from ((key, "unreadable") for key, _ in wanted[start:stop])
            else:
                view = content.data[:count]
                for key, place in wanted[start:stop]:
                    record = view[place.offset - first.offset : place.end - first.offset]
                    yield key, _checked(record, place, identity, key)
            start = stop

    def used(self, packs: set[int]) -> None:
        """These packs were read: they are given up last, also by a later process."""
        _check_thread()
        for pack in packs & self.packs.keys():
            self.packs.move_to_end(pack)
            os.utime(self.path(pack), (time(), self.path(pack).stat().st_mtime))

    def kill(self, place: Location) -> None:
        """Mark a record so that no scan finds it."""
        _check_thread()
        with self.path(place.pack).open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), DEAD, place.offset)

    def remove(self, pack: int) -> None:
        """Delete a pack."""
        _check_thread()
        del self.packs[pack]
        self._last = None if pack == self._last else self._last
        self.path(pack).unlink(missing_ok=True)

    def close(self) -> None:
        """Let others use the directory."""
        self._unlock()


def _private(path: Path, flags: int) -> int:
    """Open a file that is made if it is missing, for its owner alone."""
    return os.open(path, flags | os.O_CREAT, 0o600)
