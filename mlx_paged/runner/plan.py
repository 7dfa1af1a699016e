"""What rank 0 tells the other ranks of a step, as JSON numbers. Knows no mlx."""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import numpy as np

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.blocks import BlockCopy
from mlx_paged.kv.state_kind import State
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.step import Span, Step

DIGEST_BYTES = 16

VERSION = 5
"""The version of the frames between ranks. The first frame of rank 0 names it."""


class DigestMismatch(RuntimeError):
    """The ranks no longer agree on the plan, or on the block tables that it changes."""


class PlanWriter:
    """Writes a runner's steps as plans. A plan has the spans with their tokens, the numbers of
    their variants and the ids of their recurrent states, the copies, the states that are released
    or only kept for later prompts, and the changed entries of the sequences' block tables. A plan
    begins with a digest. The digest covers the digest of the plan before, the plan itself, and
    every row of the block tables that the plan changes."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        # The version and the entries that the others have, with their blocks, by row and group.
        self._sent: dict[tuple[int, int], tuple[int, Int32Array]] = {}
        self.digest = b""

    def write(
        self,
        step: Step,
        awaits: bool,  # some tokens of the step come later
        released: Sequence[int] = (),  # recurrent states that were released before the step
        rested: Sequence[int] = (),  # recurrent states that rest since before the step
    ) -> bytes:
        """The message of a step."""
        rows = self._allocator.table_rows([span.request.id for span in step.spans])
        changes = self._table_changes(rows)
        spans = [
            (
                (span.request.id, row, span.start, span.stop, int(span.samples)),
                0 if span.request.variant is None else span.request.variant.number,
                (span.stored, span.reads, span.leaves),
                span.known,
                [fork.id for fork in span.forks],
            )
            for span, row in zip(step.spans, rows.tolist(), strict=True)
        ]
        copies = [(copy.src, copy.dst, copy.group) for copy in step.copies]
        how = awaits, step.is_held_back
        states = [*released, *step.released], [*rested, *step.rested]
        plan = how, states, changes, copies, spans
        content = json.dumps(plan, separators=(",", ":")).encode()
        self.digest = _digest(self.digest, content, self._allocator, changes)
        return self.digest + content

    def _table_changes(self, rows: Int32Array) -> list[Any]:
        """The changes of the block tables. Each changed row gives its number, its group, the first
        changed column, and the entries and blocks from that column on."""
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
        # Of the latest plan, by id. The next plan may await tokens that these choose.
        self._requests: dict[int, Request] = {}
        self._num_read = 0
        self.digest = b""

    def read(self, message: bytes) -> tuple[Step, bool]:
        """The step, and whether it awaits tokens. Raises DigestMismatch if rank 0's plans or
        block tables are others."""
        expected, content = message[:DIGEST_BYTES], message[DIGEST_BYTES:]
        how, (released, rested), changes, copies, spans = json.loads(content)
        awaits, is_held_back = how
        for row, group, start, (entries, *blocks) in changes:
            self._allocator.block_tables.put(row, group, start, entries)
            self._allocator.store.put_blocks(entries, blocks, group)
        before, self._requests = self._requests, {}
        rows, self._allocator.rows = self._allocator.rows, {}
        step = Step(
            spans=[self._span(before, rows, *span) for span in spans],
            copies=[BlockCopy(*copy) for copy in copies],
            released=released,
            rested=rested,
            is_held_back=is_held_back,
        )
        self.digest = _digest(self.digest, content, self._allocator, changes)
        self._num_read += 1
        if self.digest != expected:
            digests = f"digest {expected.hex()} on rank 0, but {self.digest.hex()} here"
            raise DigestMismatch(f"plan {self._num_read} has {digests}")
        return step, awaits

    def _span(
        self,
        before: dict[int, Request],
        rows: dict[int, int],
        numbers: Any,
        variant: int,
        of_states: Any,
        tokens: list[int],
        forks: list[int],
    ) -> Span:
        request_id, row, start, stop, samples = numbers
        if rows.get(request_id) != row:
            self._allocator.block_tables.touch(row)  # even if it holds what the last user had
        self._allocator.rows[request_id] = row
        request, *children = (before.get(i) or _unknown(i, variant) for i in (request_id, *forks))
        self._requests |= {each.id: each for each in (request, *children)}
        cast(_Tokens, request.tokens).tell(start, tokens)
        guesses = tuple(tokens[len(tokens) + 1 - samples :]) if samples > 1 else ()
        stored, reads, leaves = of_states
        states = tuple(State(*state) for state in leaves)
        return Span(request, start, stop, samples, tuple(children), guesses, stored, reads, states)


class _Tokens:
    """A request's tokens as far as a plan has them: from position `start` on."""

    def __init__(self) -> None:
        self.tell(0, [])

    def __len__(self) -> int:
        return self._start + len(self._tokens)

    def tell(self, start: int, tokens: list[int]) -> None:
        """A plan has these tokens of the request, from position `start` on."""
        self._start, self._tokens = start, tokens

    def __getitem__(self, span: slice) -> list[int]:
        return self._tokens[span.start - self._start : span.stop - self._start]


_NOTHING: Int32Array = np.zeros((1, 0), np.int32)


def _row_content(allocator: BlockAllocator, row: int, group: int) -> Int32Array:
    """The entries of a row, and under each its blocks if these are several: a copy."""
    entries = allocator.block_tables.row(row, group)
    return np.vstack([entries[None], allocator.store.blocks_of_entries(entries, group)])


class _Numbered(NamedTuple):
    """A variant of which only the number is known."""

    number: int
    name: str = ""
    key: bytes = b""


def _unknown(request_id: int, variant: int) -> Request:
    own = _Numbered(variant) if variant else None
    return Request(request_id, cast(list[int], _Tokens()), SamplingParams(), 0, variant=own)


def _digest(before: bytes, content: bytes, allocator: BlockAllocator, changes: list[Any]) -> bytes:
    found = blake2b(before + content, digest_size=DIGEST_BYTES)
    for row, group, *_ in changes:
        found.update(_row_content(allocator, row, group).tobytes())
    return found.digest()
