"""The block tables of all live sequences in one array. Knows no mlx."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_paged.kv.prefix_cache import ROOT

Int32Array = npt.NDArray[np.int32]


class BlockTables:
    """Rows of block ids, one for each sequence and layer group: a step copies those of its
    sequences with one fancy index. A sequence has the same row in every group. Rows and columns
    double when they are full."""

    def __init__(self, num_groups: int = 1, num_rows: int = 64, num_columns: int = 64) -> None:
        # Grows with every change of an entry that a reader may know: not when blocks are appended.
        self.version = 0
        self.num_appends = 0  # grows when blocks are appended
        self._entries: Int32Array = np.zeros((num_groups, num_rows, num_columns), np.int32)
        self._lengths: Int32Array = np.zeros((num_groups, num_rows), np.int32)
        self._versions = np.zeros(num_rows, np.int64)  # `version` after each row's latest change
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_rows_taken(self) -> int:
        return len(self._versions) - len(self._free_rows)

    def add_row(self) -> int:
        if not self._free_rows:
            self._add_rows()
        row = self._free_rows.pop()
        self.touch(row)
        return row

    def release_row(self, row: int) -> None:
        self._lengths[:, row] = 0
        self.touch(row)
        self._free_rows.append(row)

    def length(self, row: int, group: int = 0) -> int:
        return int(self._lengths[group, row])

    def lengths(self, rows: Int32Array, group: int = 0) -> Int32Array:
        """Entries of each of several rows, a copy."""
        lengths: Int32Array = self._lengths[group, rows]
        return lengths

    def versions(self, rows: Int32Array) -> npt.NDArray[np.int64]:
        """What `version` was after the latest change of each row, a copy."""
        return self._versions[rows]

    def row(self, row: int, group: int = 0) -> Int32Array:
        """The row's block ids, ``[length]``: a view, valid until the next change."""
        return self._entries[group, row, : self._lengths[group, row]]

    def tables(self, group: int = 0) -> Int32Array:
        """All rows, ``[R, M]``: a view, valid until the next change."""
        tables: Int32Array = self._entries[group]
        return tables

    def rows(self, rows: Sequence[int] | Int32Array, group: int = 0) -> Int32Array:
        """A copy of several rows, ``[len(rows), longest]``; past a row's end is padding."""
        width = int(self._lengths[group, rows].max(initial=0))
        return self._entries[group, rows, :width]

    def entries(self, rows: Int32Array, columns: Int32Array, group: int = 0) -> Int32Array:
        """One entry of each row, ``[len(rows)]``: of row i the entry in column ``columns[i]``."""
        entries: Int32Array = self._entries[group, rows, columns]
        return entries

    def extend(self, row: int, blocks: list[int], group: int = 0, start: int = 0) -> None:
        """Append blocks, the first one in column `start` or after the last one."""
        start = max(start, self.length(row, group))
        stop = start + len(blocks)
        while stop > self._entries.shape[2]:
            self._widen()
        self._entries[group, row, start:stop] = blocks
        self._lengths[group, row] = stop
        self.num_appends += 1

    def append_each(
        self, rows: Sequence[int], blocks: Sequence[int], columns: Sequence[int], group: int = 0
    ) -> None:
        """Append a block to each of several rows, all of them different, in these columns."""
        while max(columns) >= self._entries.shape[2]:
            self._widen()
        self._entries[group, rows, columns] = blocks
        self._lengths[group, rows] = np.array(columns) + 1
        self.num_appends += 1

    def replace(self, row: int, index: int, block: int, group: int = 0) -> None:
        self._entries[group, row, index] = block
        self.touch(row)

    def put(self, row: int, group: int, start: int, blocks: Sequence[int]) -> None:
        """Copy a row of another table: `blocks` are all its entries from column `start` on."""
        while row >= len(self._versions):
            self._add_rows()
        if start < self.length(row, group):
            self.touch(row)
        self._lengths[group, row] = start
        self.extend(row, list(blocks), group)

    def touch(self, row: int) -> None:
        """Let readers copy the row anew."""
        self.version += 1
        self._versions[row] = self.version

    def truncate(self, row: int, length: int, group: int = 0) -> list[int]:
        """Keep the row's first `length` blocks; returns the others."""
        removed: list[int] = self.row(row, group)[length:].tolist()
        self._lengths[group, row] = min(length, self.length(row, group))
        self.touch(row)
        return removed

    def copy_row(self, source: int, target: int) -> None:
        self._entries[:, target] = self._entries[:, source]
        self._lengths[:, target] = self._lengths[:, source]
        self.touch(target)

    def renumber(self, kept: Int32Array) -> None:
        """Block ``kept[i]`` is block i now. Entries of other blocks mean nothing."""
        self._entries = renumbered(self._entries, kept)
        self.version += 1
        self._versions[:] = self.version

    def _add_rows(self) -> None:
        num_rows = len(self._versions)
        self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)], axis=1)
        self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)], axis=1)
        self._versions = np.concatenate([self._versions, np.zeros_like(self._versions)])
        self._free_rows += range(2 * num_rows - 1, num_rows - 1, -1)

    def _widen(self) -> None:
        self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)], axis=2)


def renumbered(blocks: Int32Array, kept: Int32Array) -> Int32Array:
    """The new numbers of blocks where ``kept[i]`` is block i now, and 0 for all other blocks."""
    numbers = np.zeros(max(blocks.max(initial=0), kept.max(initial=0)) + 1, np.int32)
    numbers[kept] = np.arange(len(kept))
    return numbers[blocks]


def common_prefixes(entries: Int32Array, lengths: Int32Array) -> Int32Array:
    """``[2, R]``: an order of the rows in which equal beginnings are neighbours, and for each row
    in this order how many of its first entries are those of the row before it. Row i has
    ``lengths[i]`` entries; what is behind them may part rows that are longer."""
    width = entries.shape[1]
    order = np.argsort(entries.view(f"V{width * entries.itemsize}").ravel(), kind="stable")
    ranked, ends = entries[order], lengths[order]
    differ = ranked[1:] != ranked[:-1]
    first = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
    common = np.zeros((2, len(order)), np.int32)
    common[0] = order
    common[1, 1:] = np.minimum(first, np.minimum(ends[1:], ends[:-1]))
    return common


@dataclass(slots=True)
class SequenceBlocks:
    """A sequence and the state of its blocks."""

    row: int  # the row of the block tables with its block ids
    # For each layer group the first entry that the sequence holds. The entries before it are
    # behind the group's window, and were released.
    first_entries: list[int]
    num_tokens: int = 0  # positions ``[0, num_tokens)`` belong to the sequence
    hashes: list[bytes] = field(default_factory=list)  # of its registered full blocks
    root: bytes = ROOT  # the parent hash of its first block
    is_reusable: bool = True  # whether its K/V may be registered for reuse
    gives_way: bool = False  # whether its K/V is the first to go
    # Positions ``[private_start, private_stop)`` may be written without a copy.
    private_start: int = 0
    private_stop: int = 0
    states: Any = None  # what its layers keep beside K/V; only the kind of states looks into it

    def prefix_hash(self, num_blocks: int) -> bytes:
        return self.hashes[num_blocks - 1] if num_blocks else self.root
