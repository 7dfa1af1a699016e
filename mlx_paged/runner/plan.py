"""What rank 0 tells the other ranks of a step, as int32 numbers. Knows no mlx."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
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
DROP, FORK, FORGET = range(3)


class DigestMismatch(RuntimeError):
    """The ranks no longer agree on the plan, or on the block tables that it changes."""


class PlanWriter:
    """Writes a runner's steps. A plan has the spans with their tokens, copies, snapshots by number,
    calls since the plan before, and those entries of the sequences' block tables that changed.

    Each plan begins with a digest of itself, of the digest before and of all table rows of which it
    has entries.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        # The version and the entries that the others have, by row and group.
        self._sent: dict[tuple[int, int], tuple[int, Int32Array]] = {}
        self._numbers: WeakKeyDictionary[Snapshot, int] = WeakKeyDictionary()
        self._count = 0  # numbers given to snapshots
        self._dead: list[int] = []  # snapshots that nothing here keeps
        self._calls: list[int] = []
        self.digest = b""

    def drop(self, request: Request) -> None:
        snapshot = request.snapshot
        self._calls += (DROP, request.id, -1 if snapshot is None else self._number(snapshot))

    def fork(self, parent: Request, child: Request) -> None:
        self._calls += (FORK, parent.id, child.id)

    def write(self, step: Step, awaits: bool) -> bytes:
        """A step whose drafts are in their requests' tokens. `awaits`: some tokens come later."""
        calls, self._calls = self._calls, []
        while self._dead:
            calls += (FORGET, self._dead.pop(), 0)
        seq_ids = [span.request.id for span in step.spans]
        rows = self._allocator.table_rows(seq_ids)
        changes, changed = self._table_changes(rows)
        plan = [awaits, len(calls), *calls, len(changes), *changes]
        plan += _counted((copy.src, copy.dst, copy.group) for copy in step.copies)
        plan += _counted((r.id, self._number(snapshot)) for r, snapshot in step.restores)
        plan.append(len(step.spans))
        for span, row in zip(step.spans, rows.tolist(), strict=True):
            tokens = span.request.tokens[span.start : span.stop]
            plan += (span.request.id, row, span.start, span.stop, span.samples, len(span.drafts))
            plan += (len(tokens), *tokens)
            plan += _counted((fork.id,) for fork in span.forks)
            plan += _counted((self._number(s), s.position) for s in span.snapshots)
        content = array("i", plan).tobytes()
        self.digest = _digest(self.digest, content, self._allocator, changed)
        return self.digest + content

    def _number(self, snapshot: Snapshot) -> int:
        if snapshot not in self._numbers:
            self._numbers[snapshot] = self._count
            finalize(snapshot, self._dead.append, self._count).atexit = False
            self._count += 1
        return self._numbers[snapshot]

    def _table_changes(self, rows: Int32Array) -> tuple[list[int], list[tuple[int, int]]]:
        """Row, group, first column, number of entries and entries of each row that changed."""
        tables, changes = self._allocator.block_tables, list[int]()
        changed: list[tuple[int, int]] = []
        versions = tables.versions(rows).tolist()
        for group in range(len(self._allocator.groups)):
            lengths = tables.lengths(rows, group).tolist()
            for row, version, length in zip(rows.tolist(), versions, lengths, strict=True):
                known_version, known = self._sent.get((row, group), (-1, _NOTHING))
                if known_version == version and len(known) == length:
                    continue
                entries = tables.row(row, group).copy()
                width = min(len(known), length)
                others = np.flatnonzero(known[:width] != entries[:width])
                start = int(others[0]) if others.size else width
                changes += (row, group, start, length - start, *entries[start:].tolist())
                changed.append((row, group))
                self._sent[row, group] = version, entries
        return changes, changed


@dataclass(slots=True)
class Plan:
    """A step as another rank sees it, and the calls before it: a request to drop and None, or a
    parent and its child."""

    step: Step
    awaits: bool
    calls: list[tuple[Request, Request | None]] = field(default_factory=list)


class MirroredAllocator(BlockAllocator):
    """Has the block tables of another rank's allocator, and hands out nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rows: dict[int, int] = {}  # of the block tables, by sequence

    def table_rows(self, seq_ids: Sequence[int]) -> Int32Array:
        return np.array([self.rows[seq_id] for seq_id in seq_ids], np.int32)


class PlanReader:
    """Reads plans into an allocator that only follows them."""

    def __init__(self, allocator: MirroredAllocator) -> None:
        self._allocator = allocator
        self._requests: dict[int, Request] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self.digest = b""
        self._num_read = 0

    def read(self, message: bytes) -> Plan:
        """Raises DigestMismatch if the plan is not that of rank 0's state."""
        content = message[DIGEST_BYTES:]
        numbers = iter(array("i", content))
        plan = Plan(Step(), bool(next(numbers)))
        for kind, first, second in _tuples(numbers, 3, next(numbers) // 3):
            self._call(plan, kind, first, second)
        changed = self._change_tables(iter(list(islice(numbers, next(numbers)))))
        step = plan.step
        step.copies = [BlockCopy(*copy) for copy in _tuples(numbers, 3, next(numbers))]
        restores = list(_tuples(numbers, 2, next(numbers)))
        step.restores = [(self._request(i), self._snapshots[number]) for i, number in restores]
        for _ in range(next(numbers)):
            step.spans.append(self._span(numbers))
        self.digest = _digest(self.digest, content, self._allocator, changed)
        self._num_read += 1
        if self.digest != message[:DIGEST_BYTES]:
            raise DigestMismatch(
                f"plan {self._num_read} has digest {message[:DIGEST_BYTES].hex()} on rank 0, but "
                f"{self.digest.hex()} here"
            )
        return plan

    def _call(self, plan: Plan, kind: int, first: int, second: int) -> None:
        if kind == FORGET:
            self._snapshots.pop(first, None)
        elif kind == FORK:
            parent = self._requests.get(first) or _unknown(first)  # it may have ended
            plan.calls.append((parent, self._request(second)))
        else:
            request = self._request(first)
            request.snapshot = None if second < 0 else self._snapshot(second, 0)
            plan.calls.append((request, None))
            del self._requests[first]
            self._allocator.rows.pop(first, None)

    def _change_tables(self, numbers: Iterator[int]) -> list[tuple[int, int]]:
        changed = []
        for row in numbers:
            group, start, count = islice(numbers, 3)
            self._allocator.block_tables.put(row, group, start, list(islice(numbers, count)))
            changed.append((row, group))
        return changed

    def _span(self, numbers: Iterator[int]) -> Span:
        request_id, row, start, stop, samples, num_drafts, num_tokens = islice(numbers, 7)
        request = self._request(request_id)
        self._allocator.rows[request_id] = row
        tokens = list(islice(numbers, num_tokens))
        request.tokens = cast(list[int], _Tokens(start, tokens))
        forks = tuple(self._request(i) for (i,) in _tuples(numbers, 1, next(numbers)))
        snapshots = tuple(self._snapshot(*pair) for pair in _tuples(numbers, 2, next(numbers)))
        drafts = tuple(tokens[len(tokens) - num_drafts :])
        return Span(request, start, stop, bool(samples), forks, snapshots, drafts)

    def _request(self, request_id: int) -> Request:
        known = self._requests.get(request_id)
        if known is None:
            known = self._requests[request_id] = _unknown(request_id)
        return known

    def _snapshot(self, number: int, position: int) -> Snapshot:
        return self._snapshots.setdefault(number, Snapshot(position))


class _Tokens:
    """A request's tokens as far as a plan has them: from position `start` on."""

    def __init__(self, start: int, tokens: list[int]) -> None:
        self._start, self._tokens = start, tokens

    def __getitem__(self, span: slice) -> list[int]:
        return self._tokens[span.start - self._start : span.stop - self._start]


_NOTHING: Int32Array = np.zeros(0, np.int32)
_NO_PARAMS = SamplingParams()


def _unknown(request_id: int) -> Request:
    return Request(request_id, [], _NO_PARAMS, 0)


def _counted(tuples: Iterable[tuple[int, ...]]) -> list[int]:
    """The number of tuples, then their numbers."""
    flat = list(tuples)
    return [len(flat), *(number for each in flat for number in each)]


def _tuples(numbers: Iterator[int], width: int, count: int) -> Iterator[tuple[int, ...]]:
    for _ in range(count):
        yield tuple(islice(numbers, width))


def _digest(
    before: bytes, content: bytes, allocator: BlockAllocator, changed: list[tuple[int, int]]
) -> bytes:
    found = blake2b(before + content, digest_size=DIGEST_BYTES)
    for row, group in changed:
        found.update(allocator.block_tables.row(row, group).tobytes())
    return found.digest()
