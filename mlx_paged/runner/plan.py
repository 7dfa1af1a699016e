"""What rank 0 tells the other ranks of a step, as JSON numbers. Knows no mlx."""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, cast
from weakref import WeakKeyDictionary, finalize

import numpy as np

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.blocks import BlockCopy
from mlx_paged.kv.snapshots import Snapshot
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.step import Span, Step

DIGEST_BYTES = 16


class DigestMismatch(RuntimeError):
    """The ranks no longer agree on the plan, or on the block tables that it changes."""


class PlanWriter:
    """Writes a runner's steps as plans. A plan has the spans with their tokens, the copies, the
    snapshots by number, the calls since the plan before, and the changed entries of the sequences'
    block tables. A plan begins with a digest. The digest covers the digest of the plan before, the
    plan itself, and every row of the block tables that the plan changes."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        # The version and the entries that the others have, with their blocks, by row and group.
        self._sent: dict[tuple[int, int], tuple[int, Int32Array]] = {}
        self._numbers: WeakKeyDictionary[Snapshot, int] = WeakKeyDictionary()
        self._count = 0  # numbers given to snapshots
        self._dead: list[int] = []  # those of snapshots that nothing keeps
        self._calls: list[tuple[int, int | None, tuple[int, int] | None]] = []
        self.digest = b""

    def drop(self, request: Request) -> None:
        snapshot = request.snapshot
        pair = None if snapshot is None else (self._number(snapshot), snapshot.position)
        self._calls.append((request.id, None, pair))

    def fork(self, parent: Request, child: Request) -> None:
        self._calls.append((parent.id, child.id, None))

    def write(self, step: Step, awaits: bool) -> bytes:
        """`awaits`: some tokens of the step come later."""
        calls, self._calls = self._calls, []
        dead = [self._dead.pop() for _ in range(len(self._dead))]
        rows = self._allocator.table_rows([span.request.id for span in step.spans])
        changes = self._table_changes(rows)
        spans = [
            (
                (span.request.id, row, span.start, span.stop, span.samples, len(span.drafts)),
                (span.behind, span.keep),
                span.known,
                [fork.id for fork in span.forks],
                [(self._number(s), s.position) for s in span.snapshots],
            )
            for span, row in zip(step.spans, rows.tolist(), strict=True)
        ]
        copies = [(copy.src, copy.dst, copy.group) for copy in step.copies]
        restores = [(request.id, self._number(s)) for request, s in step.restores]
        how = awaits, step.is_held_back
        plan = how, calls, dead, changes, copies, restores, spans
        content = json.dumps(plan, separators=(",", ":")).encode()
        self.digest = _digest(self.digest, content, self._allocator, changes)
        return self.digest + content

    def _number(self, snapshot: Snapshot) -> int:
        if snapshot not in self._numbers:
            self._numbers[snapshot] = self._count
            finalize(snapshot, self._dead.append, self._count).atexit = False
            self._count += 1
        return self._numbers[snapshot]

    def _table_changes(self, rows: Int32Array) -> list[Any]:
        """Of each changed row: row, group, first column, and from there on entries and blocks."""
        tables, changes = self._allocator.block_tables, list[Any]()
        versions = tables.versions(rows).tolist()
        for group in range(len(self._allocator.groups)):
            lengths = tables.lengths(rows, group).tolist()
            for row, version, length in zip(rows.tolist(), versions, lengths, strict=True):
                known_version, known = self._sent.get((row, group), (-1, _NOTHING))
                if known_version == version and known.shape[1] == length:
                    continue
                content = _row_content(self._allocator, row, group)
                width = min(known.shape[1], length)
                same = (known[:, :width] == content[:, :width]).all(axis=0) if width else _NOTHING
                others = np.flatnonzero(np.logical_not(same))
                start = int(others[0]) if others.size else width
                changes.append((row, group, start, content[:, start:].tolist()))
                self._sent[row, group] = version, content
        return changes


class MirroredAllocator(BlockAllocator):
    """Has the block tables of another rank's allocator, and hands out nothing."""

    def __init__(self, like: BlockAllocator) -> None:
        super().__init__(like.num_blocks, like.block_size, like.groups, like.chunk)
        self.rows: dict[int, int] = {}  # of the block tables, by sequence

    def table_rows(self, seq_ids: Sequence[int]) -> Int32Array:
        return np.array([self.rows[seq_id] for seq_id in seq_ids], np.int32)


class PlanReader:
    """Reads plans into an allocator that only follows them."""

    def __init__(self, allocator: MirroredAllocator) -> None:
        self._allocator = allocator
        self._requests: dict[int, Request] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._num_read = 0
        self.digest = b""

    def read(self, message: bytes) -> tuple[Step, bool, list[tuple[Request, Request | None]]]:
        """The step, whether it awaits tokens, and the calls before it: a request to drop and None,
        or a parent and its child. Raises DigestMismatch if rank 0's state is another one."""
        expected, content = message[:DIGEST_BYTES], message[DIGEST_BYTES:]
        (awaits, is_held_back), calls, dead, changes, copies, restores, spans = json.loads(content)
        found = [self._call(*call) for call in calls]
        for number in dead:
            self._snapshots.pop(number, None)
        for row, group, start, (entries, *blocks) in changes:
            self._allocator.block_tables.put(row, group, start, entries)
            self._allocator.store.put_blocks(entries, blocks, group)
        step = Step(copies=[BlockCopy(*copy) for copy in copies], is_held_back=is_held_back)
        step.restores = [(self._request(i), self._snapshots[number]) for i, number in restores]
        step.spans = [self._span(*span) for span in spans]
        self.digest = _digest(self.digest, content, self._allocator, changes)
        self._num_read += 1
        if self.digest != expected:
            digests = f"digest {expected.hex()} on rank 0, but {self.digest.hex()} here"
            raise DigestMismatch(f"plan {self._num_read} has {digests}")
        return step, awaits, found

    def _call(self, first: int, child: int | None, snapshot: Any) -> Any:
        if child is not None:  # the parent may have ended
            return self._requests.get(first) or _unknown(first), self._request(child)
        request = self._requests.pop(first, None) or _unknown(first)
        request.snapshot = None if snapshot is None else self._snapshot(*snapshot)
        self._allocator.rows.pop(first, None)
        return request, None

    def _span(self, numbers: Any, more: Any, tokens: list[int], forks: Any, taken: Any) -> Span:
        request_id, row, start, stop, samples, num_drafts = numbers
        request = self._request(request_id)
        if self._allocator.rows.get(request_id) != row:
            self._allocator.block_tables.touch(row)  # even if it holds what the last user had
        self._allocator.rows[request_id] = row
        request.tokens = cast(list[int], _Tokens(start, tokens))
        children = tuple(map(self._request, forks))
        states = tuple(self._snapshot(*pair) for pair in taken)
        drafts = tuple(tokens[len(tokens) - num_drafts :])
        return Span(request, start, stop, bool(samples), children, states, drafts, *more)

    def _request(self, request_id: int) -> Request:
        if request_id not in self._requests:
            self._requests[request_id] = _unknown(request_id)
        return self._requests[request_id]

    def _snapshot(self, number: int, position: int) -> Snapshot:
        return self._snapshots.setdefault(number, Snapshot(position))


class _Tokens:
    """A request's tokens as far as a plan has them: from position `start` on."""

    def __init__(self, start: int, tokens: list[int]) -> None:
        self._start, self._tokens = start, tokens

    def __getitem__(self, span: slice) -> list[int]:
        return self._tokens[span.start - self._start : span.stop - self._start]


_NOTHING: Int32Array = np.zeros((1, 0), np.int32)


def _row_content(allocator: BlockAllocator, row: int, group: int) -> Int32Array:
    """The entries of a row, and under each its blocks if these are several: a copy."""
    entries = allocator.block_tables.row(row, group)
    return np.vstack([entries[None], allocator.store.blocks_of_entries(entries, group)])


def _unknown(request_id: int) -> Request:
    return Request(request_id, [], SamplingParams(), 0)


def _digest(before: bytes, content: bytes, allocator: BlockAllocator, changes: list[Any]) -> bytes:
    found = blake2b(before + content, digest_size=DIGEST_BYTES)
    for row, group, *_ in changes:
        found.update(_row_content(allocator, row, group).tobytes())
    return found.digest()
