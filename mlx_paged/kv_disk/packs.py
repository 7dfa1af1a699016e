"""Append-only files of checked records: packs. Their functions wait for the disk. Knows no mlx."""

import errno
import fcntl
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from time import time
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

FILE_MAGIC = b"mlx_paged K/V 4\n"
"""First bytes of a pack; they name the version of the format."""
RECORD, DEAD = b"KVrc", b"dead"
HEADER = Struct("<4sI32s24s16sIIQII")
"""Magic, CRC of the rest of the header, identity, key, the fields of an :class:`Origin`, and the
payload's bytes and checksums."""
ORIGIN, TOLD = slice(64, 88), Struct("<16sII")
"""Where the fields of an :class:`Origin` are in a header, and what they are."""
IS_FIRST, IS_BACKGROUND = 1, 2
"""Bits of the last of these fields."""
ROW = 2048
"""Bytes in a row of the words that numpy adds up, faster than zlib computes a CRC of them."""
PACKS = 64
"""About how many packs a full store has. The store gives up one pack at a time."""
MIN_PACK, MAX_PACK = 1 << 20, 1 << 28
MOST_USES = 8
"""All of a pack counts as used so many times at most, so that it is given up at last."""
MIN_FREE = 0.05
"""Part of the disk that stays free."""
READ_RECORDS = 512
"""The most neighbouring records that one call reads: a call can fill 1,024 pieces of memory."""

_thread = threading.local()


def allow_disk() -> None:
    """Let this thread wait for the disk. Threads of the store do, an engine's thread never does."""
    _thread.may_wait = True


def _check_thread() -> None:
    assert getattr(_thread, "may_wait", False), "a disk call on a thread that must not wait"


class Origin(NamedTuple):
    """The text that a record is of, as far as it is told.

    Attributes:
        parent: the hash of the block before; zeros: there is none, or the record is no block.
        num_tokens: of the block; 0: the record is no block.
        is_first: whether the block begins a text.
        is_background: whether the record is the first to go.
        is_used: whether its content was found again before it was written. A header does not tell.
        worth: what it is worth if so, in :data:`~mlx_paged.kv.worth.UNIT`. Nor does it tell this.
    """

    parent: bytes = bytes(16)
    num_tokens: int = 0
    is_first: bool = False
    is_background: bool = False
    is_used: bool = True
    worth: int = 0

    @property
    def fields(self) -> tuple[bytes, int, int]:
        """Its fields of a header."""
        bits = self.is_first * IS_FIRST + self.is_background * IS_BACKGROUND
        return self.parent, self.num_tokens, bits


NO_ORIGIN = Origin()


class Location(NamedTuple):
    """Where a record is. `num_bytes` are the bytes of its payload."""

    pack: int
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + HEADER.size + self.num_bytes


class Record(NamedTuple):
    """A record that was found."""

    identity: bytes
    key: bytes
    location: Location
    origin: Origin


def _sums(payloads: Any) -> list[tuple[int, int]]:
    """Two checksums of each payload ``[n, bytes]``. A payload is a matrix of words with rows of ROW
    bytes, and a rest. Both are of the sums of its rows and of its columns, mod 2**64, and its rest.
    Any change of one word changes both kinds of sums. Not noticed: rows of equal sums that change
    places, and changes that cancel each other in all rows and all columns."""
    count, num_rows = len(payloads), payloads.shape[1] // ROW
    words = payloads[:, : num_rows * ROW].view(np.uint64).reshape(count, num_rows, ROW // 8)
    sums = [words.sum(axis).view(np.uint8) for axis in (1, 2)]
    checked = np.concatenate([*sums, payloads[:, num_rows * ROW :]], axis=1)
    return [(zlib.crc32(each), zlib.adler32(each)) for each in checked]


def _header(*fields: Any) -> bytes:
    """The header with these fields after its CRC."""
    rest = HEADER.pack(RECORD, 0, *fields)[8:]
    return RECORD + zlib.crc32(rest).to_bytes(4, "little") + rest


def damage(header: Any) -> str | None:
    """Why a header cannot be trusted; None: it can."""
    if len(header) < HEADER.size:
        return "truncated"
    is_right = zlib.crc32(header[8:]) == int.from_bytes(header[4:8], "little")
    return None if is_right and header[:4] in (RECORD, DEAD) else "header"


class PackFiles:
    """The packs of a directory, at most `max_bytes` in all.

    When they are full, a pack goes: one of the background first, then the one of the least rank, of
    several the one unused longest. A pack is of the background if all its records are, and none was
    read since the directory was opened. A record of the background makes no other pack go.

    The rank of a pack is the worth of what was used of it since the directory was opened, per byte
    of the pack, counted up to `MOST_USES` times `least`, plus the rank of the pack that went last
    before its latest use (GreedyDual: Young 1994, Algorithmica 11). A record is used when it is
    read, and once if its content was used before it was written. What was never used makes no pack
    go whose rank has grown by more than `least` since then.

    One process uses a directory at a time. Only :meth:`append` makes files. Nothing in a pack
    changes except the marks of dead records.

    Attributes:
        packs: bytes of each pack by its number, the one unused longest first.
        least: the worth of content that was never used.
        background: packs of the background.
        written_today: bytes of the packs found that were written in 24 hours, as their times say.

    Raises:
        ValueError: another engine uses the directory, or it cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.packs: OrderedDict[int, int] = OrderedDict()
        self.written_today = 0
        self._pack_bytes = min(MAX_PACK, max_bytes, max(MIN_PACK, max_bytes // PACKS))
        self.background = set[int]()
        self.least = 0
        self._values: dict[int, int] = {}  # worth of what was used of each pack, times its bytes
        self._since: dict[int, int] = {}  # `_floor` at the latest use
        self._floor = 0  # rank of the pack that went last
        # The pack to append to, for records of the background and for others.
        self._last: dict[bool, int] = {}
        problem, lock = "", -1
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            lock = _private(self.directory / "lock", os.O_RDWR)
            self.close = finalize(self, os.close, lock)  # lets others use the directory
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(lock, f"{os.getpid():<20}".encode(), 0)
        except BlockingIOError:
            user = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
            self.close()
            problem = f", which process {user} uses: expected a directory of its own"
        except OSError as error:
            problem = f" ({error.strerror}): expected a directory that can be written"
        if problem:
            raise ValueError(f"[Engine] kv_disk is {str(directory)!r}{problem}")

    @property
    def num_bytes(self) -> int:
        return sum(self.packs.values())

    def path(self, pack: int) -> Path:
        return self.directory / f"{pack:08}.kv"

    def scan(self) -> Iterator[Record | str]:
        """Every record, newest pack first; of damage a reason."""
        _check_thread()
        found = []
        for path in self.directory.glob("*.kv"):
            if path.stem.isdecimal() and path == self.path(int(path.stem)):
                status = path.stat()
                found.append((status.st_atime, int(path.stem), status.st_size))
                self.written_today += status.st_size * (status.st_mtime > time() - 86400)
        self.packs.update((pack, size) for _, pack, size in sorted(found))
        for pack, size in reversed(list(self.packs.items())):
            try:
                yield from self._records(pack, size)
            except OSError:
                yield "unreadable"

    def _records(self, pack: int, num_bytes: int) -> Iterator[Record | str]:
        kinds = set[bool]()
        with self.path(pack).open("rb", buffering=0) as file:
            offset, reason = len(FILE_MAGIC), None
            if file.read(offset) != FILE_MAGIC:
                reason = "format"
            while reason is None and offset < num_bytes:
                header = os.pread(file.fileno(), HEADER.size, offset)
                if (reason := damage(header)) is None:
                    magic, _, identity, key, *told, size, _, _ = HEADER.unpack(header)
                    parent, num_tokens, bits = told
                    is_background = bits & IS_BACKGROUND > 0
                    origin = Origin(parent, num_tokens, bits & IS_FIRST > 0, is_background)
                    location = Location(pack, offset, size)
                    offset = location.end
                    if offset > num_bytes:
                        reason = "truncated"
                    elif magic == RECORD:
                        kinds.add(is_background)
                        yield Record(identity, key, location, origin)
        if kinds == {True}:
            self.background.add(pack)
        if reason is not None:
            yield reason

    def first_to_go(self, kept: int = 0) -> int:
        """The pack that is given up first. The pack `kept` stays; there is another one."""
        others = [pack for pack in self.packs if pack != kept]
        of_background = (pack for pack in others if pack in self.background)
        return next(of_background, None) or min(others, key=self._place_of)

    def _place_of(self, pack: int) -> int:
        """The order in which packs go that are not of the background."""
        of_bytes = self._values.get(pack, 0) // max(1, self.packs[pack])
        return self._since.get(pack, 0) + min(of_bytes, MOST_USES * self.least)

    def has_room(self, num_bytes: int, origin: Origin) -> bool:
        """Whether a payload can be written although its origin may not make every pack go."""
        if not origin.is_background:
            last = self._last.get(False, 0)
            is_full = self.num_bytes + HEADER.size + num_bytes > self.max_bytes
            if origin.is_used or not is_full or not self.packs.keys() - {last}:
                return True
            first = self.first_to_go(kept=last)
            return first in self.background or self._place_of(first) <= self._floor + self.least
        kept = sum(size for pack, size in self.packs.items() if pack not in self.background)
        last = self.packs.get(self._last.get(True, 0), 0)
        return kept + last + HEADER.size + num_bytes + len(FILE_MAGIC) <= self.max_bytes

    def append(
        self, identity: bytes, key: bytes, payload: Any, origin: Origin = NO_ORIGIN
    ) -> tuple[Location, list[int]]:
        """Write a record; returns its location and the packs that were given up for it.

        Raises:
            OSError: it cannot be written, or the disk would be too full.
        """
        _check_thread()
        size = HEADER.size + len(payload)
        disk = os.statvfs(self.directory)
        left = disk.f_bavail * disk.f_frsize - size
        if size > self.max_bytes or left < MIN_FREE * disk.f_blocks * disk.f_frsize:
            raise OSError(errno.ENOSPC, "the disk is too full")
        kind = origin.is_background
        pack, is_new = self._last.pop(kind, None), False
        if pack is None or self.packs[pack] + size > self._pack_bytes:
            pack, is_new = max(self.packs, default=0) + 1, True
        file = _private(self.path(pack), os.O_WRONLY | (os.O_EXCL if is_new else 0))
        try:  # what comes after a torn record is not found again: `_last` has no pack meanwhile
            if is_new:
                self.background.update([pack] if kind else [])
                self.packs[pack] = 0
                self.packs[pack] = os.write(file, FILE_MAGIC)
            self.packs.move_to_end(pack)
            removed = []
            while self.num_bytes + size > self.max_bytes and len(self.packs) > 1:
                removed.append(self.first_to_go(kept=pack))
                self._floor = max(self._floor, self._place_of(removed[-1]))
                self.remove(removed[-1])
            location = Location(pack, self.packs[pack], len(payload))
            (sums,) = _sums(np.frombuffer(payload, np.uint8)[None])
            header = _header(identity, key, *origin.fields, len(payload), *sums)
            if os.pwritev(file, [header, payload], location.offset) != size:
                raise OSError(errno.ENOSPC, "the disk is full")
        finally:
            self.packs[pack] = os.fstat(file).st_size  # a torn record counts, too
            os.close(file)
        self._last[kind] = pack
        self._count_use(pack, origin.worth * len(payload))
        return location, removed

    def _count_use(self, pack: int, value: int) -> None:
        """Count what something of a pack is worth, times its bytes."""
        self._values[pack] = self._values.get(pack, 0) + value
        self._since[pack] = self._floor

    def read(
        self, wanted: Sequence[tuple[bytes, Location, int]], rows: dict[int, Any], identity: bytes
    ) -> Iterator[str | None]:
        """Read payloads by their keys and locations, each into a row of the memory for its size,
        ``[n, num_bytes]`` uint8. Yields for each payload None, or why it is not what was written
        under its key. Neighbouring records are read at once. Of the rows between the first and the
        last that are read, each is read by this call or filled already."""
        _check_thread()
        headers, ends = np.empty((len(wanted), HEADER.size), np.uint8), list[int]()
        while (start := len(ends)) < len(wanted):
            first, stop = wanted[start][1], start + 1
            while stop < min(len(wanted), start + READ_RECORDS) and (
                wanted[stop][1][:2] == (first.pack, wanted[stop - 1][1].end)
            ):
                stop += 1
            run = zip(headers[start:stop], wanted[start:stop], strict=True)
            pieces = [p for head, (_, at, row) in run for p in (head, rows[at.num_bytes][row])]
            end = 0
            with suppress(OSError), self.path(first.pack).open("rb", buffering=0) as file:
                end = first.offset + os.preadv(file.fileno(), pieces, first.offset)
            ends += [end] * (stop - start)
        sums: dict[int, tuple[int, Any]] = {}  # by size: the first row, and those of all from there
        for size in {location.num_bytes for _, location, _ in wanted}:
            used = [row for _, location, row in wanted if location.num_bytes == size]
            sums[size] = min(used), _sums(rows[size][min(used) : max(used) + 1])
        for header, end, (key, location, row) in zip(
            map(bytes, headers), ends, wanted, strict=True
        ):
            top, of_rows = sums[location.num_bytes]
            told = TOLD.unpack(header[ORIGIN])
            expected = _header(identity, key, *told, location.num_bytes, *of_rows[row - top])
            if location.end > end:
                yield "truncated" if end else "unreadable"
            elif header == expected:
                yield None
            else:
                is_other = header[:4] != RECORD or header[8:-8] != expected[8:-8]
                yield damage(header) or ("another" if is_other else "checksum")

    def used(self, packs: set[int], values: Mapping[int, int] | None = None) -> None:
        """Note that packs were read, and what that is worth times its bytes. Of packs of the same
        rank those that were read lately are given up last, also by a later process."""
        _check_thread()
        for pack in packs & self.packs.keys():
            self._count_use(pack, 0 if values is None else values.get(pack, 0))
        if self._last.get(True) in packs:
            del self._last[True]
        self.background -= packs
        for pack in packs & self.packs.keys():
            self.packs.move_to_end(pack)
            os.utime(self.path(pack), (time(), self.path(pack).stat().st_mtime))

    def kill(self, location: Location) -> None:
        """Mark a record so that no scan finds it."""
        _check_thread()
        with self.path(location.pack).open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), DEAD, location.offset)

    def remove(self, pack: int) -> None:
        """Delete a pack."""
        _check_thread()
        del self.packs[pack]
        self.background.discard(pack)
        self._values.pop(pack, None)
        self._since.pop(pack, None)
        self._last = {kind: last for kind, last in self._last.items() if last != pack}
        self.path(pack).unlink(missing_ok=True)


def _private(path: Path, flags: int) -> int:
    """Open a file that is made if it is missing, for its owner alone."""
    return os.open(path, flags | os.O_CREAT, 0o600)
