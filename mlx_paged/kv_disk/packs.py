"""Append-only files of checked records: packs. Their functions wait for the disk. Knows no mlx."""

import errno
import fcntl
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from struct import Struct
from time import time
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

FILE_MAGIC = b"mlx_paged K/V 1\n"
"""First bytes of a pack; they name the version of the format."""
RECORD, DEAD = b"KVrc", b"dead"
HEADER = Struct("<4sI32s24sQIQ")
"""Magic, CRC of the rest of the header, identity, key, and the payload's bytes, CRC and sum."""
KEY_BYTES = 24
PACKS = 64
"""A full store has about so many packs: the store gives up one at a time."""
MIN_PACK, MAX_PACK = 1 << 20, 1 << 28
MIN_FREE = 0.05
"""Part of the disk that stays free."""

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


@dataclass(slots=True)
class Pack:
    """One file, and the number of its bytes."""

    path: Path
    num_bytes: int


def checksums(payload: Any) -> tuple[int, int]:
    """A CRC of 32 bits and the sum of all whole 64-bit words."""
    words = np.frombuffer(payload, np.uint64, len(payload) // 8)
    return zlib.crc32(payload), int(words.sum(dtype=np.uint64))


def _header(identity: bytes, key: bytes, payload: Any) -> bytes:
    rest = HEADER.pack(RECORD, 0, identity, key, len(payload), *checksums(payload))[8:]
    return RECORD + zlib.crc32(rest).to_bytes(4, "little") + rest


class PackFiles:
    """The packs of a directory, at most `max_bytes` in all.

    One process uses a directory at a time. Only :meth:`append` makes files; a pack is never changed
    but for marks of dead records.

    Raises:
        ValueError: another engine uses the directory, or it cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self._pack_bytes = min(MAX_PACK, max(MIN_PACK, max_bytes // PACKS))
        self.packs: OrderedDict[int, Pack] = OrderedDict()  # the one unused longest first
        self._file = -1  # of the last pack, to append to; -1: none is open
        self._close_file: Callable[[], object] = int
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ValueError(
                f"[Engine] kv_disk is {str(directory)!r} ({error.strerror}): expected a directory "
                "that can be written"
            ) from error
        self._unlock = finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            user = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
            self._unlock()
            raise ValueError(
                f"[Engine] kv_disk is {str(directory)!r}, which process {user} uses: expected a "
                "directory of its own"
            ) from error
        os.pwrite(lock, f"{os.getpid():<20}".encode(), 0)

    @property
    def num_bytes(self) -> int:
        return sum(pack.num_bytes for pack in self.packs.values())

    def written_today(self) -> int:
        """Bytes of the packs that were written in the last 24 hours, as their times say."""
        _check_thread()
        recent = 0
        for pack in self.packs.values():
            recent += pack.num_bytes * (pack.path.stat().st_mtime > time() - 86400)
        return recent

    def scan(self) -> Iterator[tuple[bytes, bytes, Location] | str]:
        """Every record as its identity, key and place, newest pack first; of damage the reason."""
        _check_thread()
        found = []
        for path in self.directory.glob("*.kv"):
            if path.stem.isdecimal():
                status = path.stat()
                found.append((status.st_atime, int(path.stem), Pack(path, status.st_size)))
        self.packs.update((number, pack) for _, number, pack in sorted(found, key=lambda f: f[:2]))
        for number, pack in reversed(list(self.packs.items())):
            try:
                yield from self._records(number, pack)
            except OSError:
                yield "unreadable"

    def _records(self, number: int, pack: Pack) -> Iterator[tuple[bytes, bytes, Location] | str]:
        with pack.path.open("rb") as file:
            if file.read(len(FILE_MAGIC)) != FILE_MAGIC:
                yield "format"
                return
            offset = len(FILE_MAGIC)
            while offset < pack.num_bytes:
                file.seek(offset)
                try:
                    magic, identity, key, size, *_ = parsed(file.read(HEADER.size))
                except DamagedError as error:
                    yield str(error)
                    return
                end = offset + HEADER.size + size
                if end > pack.num_bytes:
                    yield "truncated"
                    return
                if magic == RECORD:
                    yield identity, key, Location(number, offset, size)
                offset = end

    def append(self, identity: bytes, key: bytes, payload: Any) -> tuple[Location, list[int]]:
        """Write a record; returns its place and the packs that were given up for it.

        Raises:
            OSError: it cannot be written, or the disk would be too full.
        """
        _check_thread()
        size = HEADER.size + len(payload)
        disk = os.statvfs(self.directory)
        if size > self.max_bytes or disk.f_bavail * disk.f_frsize - size < MIN_FREE * (
            disk.f_blocks * disk.f_frsize
        ):
            raise OSError(errno.ENOSPC, "the disk is too full")
        last = max(self.packs, default=0)
        if self._file < 0 or self.packs[last].num_bytes + size > self._pack_bytes:
            self.end_pack()
            last += 1
            path = self.directory / f"{last:08}.kv"
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._close_file = finalize(self, os.close, self._file)
            self.packs[last] = Pack(path, os.write(self._file, FILE_MAGIC))
        removed = []
        while self.num_bytes + size > self.max_bytes and next(iter(self.packs)) != last:
            removed.append(next(iter(self.packs)))
            self.remove(removed[-1])
        offset = self.packs[last].num_bytes
        header = _header(identity, key, payload)
        try:
            if os.pwritev(self._file, [header, payload], offset) != size:
                raise OSError(errno.ENOSPC, "the disk is full")
        except OSError:
            self.end_pack()  # what comes after a torn record is not found again
            raise
        self.packs[last].num_bytes += size
        return Location(last, offset, len(payload)), removed

    def read(self, place: Location, identity: bytes, key: bytes, opened: dict[int, FileIO]) -> Any:
        """A record's payload, ``[num_bytes]`` uint8.

        Args:
            opened: packs that are open; this adds to them, and the caller closes them.

        Raises:
            DamagedError: it is not what was written under this key.
        """
        _check_thread()
        header = bytearray(HEADER.size)
        payload: Any = np.empty(place.num_bytes, np.uint8)
        try:
            if place.pack not in opened:
                opened[place.pack] = self.packs[place.pack].path.open("rb", buffering=0)
            count = os.preadv(opened[place.pack].fileno(), [header, payload], place.offset)
        except (OSError, KeyError):
            raise DamagedError("unreadable") from None
        if count != len(header) + len(payload):
            raise DamagedError("truncated")
        magic, *names, size, crc, total = parsed(bytes(header))
        if magic != RECORD or names != [identity, key] or size != len(payload):
            raise DamagedError("another")
        if checksums(payload.data) != (crc, total):
            raise DamagedError("checksum")
        return payload

    def used(self, numbers: set[int]) -> None:
        """These packs were read: they are given up last, also by a later process."""
        _check_thread()
        for number in numbers & self.packs.keys():
            self.packs.move_to_end(number)
            path = self.packs[number].path
            os.utime(path, (time(), path.stat().st_mtime))

    def kill(self, place: Location) -> None:
        """Mark a record so that no scan finds it."""
        _check_thread()
        with self.packs[place.pack].path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), DEAD, place.offset)

    def remove(self, number: int) -> None:
        """Delete a pack."""
        _check_thread()
        self.packs.pop(number).path.unlink(missing_ok=True)

    def end_pack(self) -> None:
        """Append to a new pack from here on."""
        self._close_file()
        self._file = -1

    def close(self) -> None:
        """Let others use the directory."""
        self.end_pack()
        self._unlock()


def parsed(header: bytes) -> tuple[bytes, bytes, bytes, int, int, int]:
    """Magic, identity, key, and the payload's bytes, CRC and sum.

    Raises:
        DamagedError: the header is short or wrong.
    """
    if len(header) < HEADER.size:
        raise DamagedError("truncated")
    magic, check, identity, key, size, crc, total = HEADER.unpack(header)
    if magic not in (RECORD, DEAD) or zlib.crc32(header[8:]) != check:
        raise DamagedError("header")
    return magic, identity, key, size, crc, total
