"""Block tables of a batch's rows, kept from step to step."""

import mlx.core as mx
import numpy as np

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import Int32Array

SPARE_COLUMNS = 16
"""Blocks by which the longest sequence may grow before all rows are copied again."""


class BatchTables:
    """The block tables of a batch's sequences, on the host and on the device.

    While the same sequences share the batch, only entries for blocks that they got since are
    written, and where there are none the device's array stays. All rows are copied, at once, when
    another sequence comes in, the order changes, or one of the rows has got other blocks than it
    had: by copy-on-write, or because it was preempted and has come back.

    Attributes:
        array: ``[R, longest]`` int32, what :meth:`update` left; past a row's end it means nothing.
    """

    array: mx.array
    _seq_ids: list[int]
    _rows: Int32Array  # of these in the allocator's tables
    _lengths: Int32Array  # blocks of each
    _host: Int32Array  # wider than `array`
    _version: int  # of the allocator's tables

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._take_over([])

    def update(self, seq_ids: list[int]) -> None:
        """Make these the tables of the sequences `seq_ids` as they are now."""
        tables = self._allocator.block_tables
        if seq_ids != self._seq_ids or self._is_outdated():
            self._take_over(seq_ids)
            return
        self._version = tables.version
        lengths = tables.lengths(self._rows)
        grown = np.flatnonzero(lengths != self._lengths).astype(np.int32)
        if grown.size == 0:
            return
        columns = self._lengths[grown]
        if lengths.max() > self._host.shape[1] or (lengths[grown] > columns + 1).any():
            self._take_over(seq_ids)
            return
        self._host[grown, columns] = tables.entries(self._rows[grown], columns)
        self._lengths = lengths
        self._upload()

    def blocks_at(self, columns: Int32Array) -> Int32Array:
        """Each sequence's block number `columns`, ``[R]``."""
        blocks: Int32Array = self._host[np.arange(len(columns)), columns]
        return blocks

    def host(self) -> Int32Array:
        """What `array` holds."""
        return self._host[:, : self._lengths.max(initial=0)]

    def _is_outdated(self) -> bool:
        tables = self._allocator.block_tables
        if tables.version == self._version:
            return False
        rows = self._allocator.table_rows(self._seq_ids)
        return bool(tables.changed_since(rows, self._version).any())

    def _take_over(self, seq_ids: list[int]) -> None:
        tables = self._allocator.block_tables
        self._seq_ids = list(seq_ids)
        self._version = tables.version
        self._rows = self._allocator.table_rows(seq_ids)
        self._lengths = tables.lengths(self._rows)
        entries = tables.rows(self._rows)
        width = entries.shape[1]
        self._host = np.zeros((len(entries), width + SPARE_COLUMNS), np.int32)
        self._host[:, :width] = entries
        self._upload()

    def _upload(self) -> None:
        # MLX takes an array in one piece much faster than a part of a wider one.
        self.array = mx.array(np.ascontiguousarray(self.host()))
