"""The block tables of a batch, which stay on the device while its sequences are the same."""

import mlx.core as mx
import numpy as np

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import Int32Array

SPARE_COLUMNS = 16  # blocks by which the longest sequence may grow before all rows are copied
FEWEST_SHARED = 64  # fewer keys in common are computed alone
FEWEST_COLUMNS = 32  # of the narrowest bucket: a GPU does not split contexts of 32 x 16 tokens


def row_bucket(rows: int) -> int:
    """The number of rows with padding: at most a sixteenth more, and none up to 32."""
    step = max(1, (1 << rows.bit_length() >> 1) // 16)
    return -(-rows // step) * step


def column_bucket(columns: int) -> int:
    """The number of columns with padding, `FEWEST_COLUMNS` times a power of four. Ops read no more
    of a table than a row's context."""
    width = FEWEST_COLUMNS
    while width < columns:
        width *= 4
    return width


class BatchTables:
    """A layer group's block tables of a batch's sequences, on the host and on the device.

    While the batch has the same sequences, an update writes only entries for their new blocks. If
    there are none, the device's array stays. All rows are copied when another sequence joins, when
    the order changes, or when a row's blocks were replaced: by copy-on-write, or because its
    sequence was preempted and runs again.

    Attributes:
        group: index of the group.
        arrays: for each member of the group ``[R, longest]`` int32, as of the last :meth:`update`;
            entries past a row's end are undefined, and so are those that a window has left.
        padded: whether the arrays have the rows and columns of their buckets.
        cascade: whether sequences with the same first blocks are looked for.
    """

    arrays: list[mx.array]
    _seq_ids: list[int]
    _rows: Int32Array  # rows of these sequences in the allocator's tables
    _lengths: Int32Array  # number of blocks of each sequence
    _host: Int32Array  # the host's copy, wider than `array`
    _version: int  # version of the allocator's tables that was copied

    def __init__(
        self,
        allocator: BlockAllocator,
        group: int = 0,
        padded: bool = False,
        cascade: bool = False,
    ) -> None:
        self.group = group
        self.padded = padded
        self.cascade = cascade
        self._allocator = allocator
        self._shared: tuple[list[int], int, int, tuple[mx.array, int]] | None = None
        self._take_over([])

    @classmethod
    def of_groups(
        cls, allocator: BlockAllocator, padded: bool = False, cascade: bool = False
    ) -> list["BatchTables"]:
        """Tables for each layer group."""
        return [cls(allocator, group, padded, cascade) for group in range(len(allocator.groups))]

    def update(self, seq_ids: list[int]) -> None:
        """Make these the tables of the sequences `seq_ids` as they are now."""
        tables = self._allocator.block_tables
        if seq_ids != self._seq_ids or self._are_replaced(seq_ids, self._version):
            self._take_over(seq_ids)
            return
        self._version = tables.version
        lengths = tables.lengths(self._rows, self.group)
        grown = np.flatnonzero(lengths != self._lengths).astype(np.int32)
        if grown.size == 0:
            return
        columns = self._lengths[grown]
        if lengths.max() > self._host.shape[1] or (lengths[grown] > columns + 1).any():
            self._take_over(seq_ids)
            return
        self._host[grown, columns] = tables.entries(self._rows[grown], columns, self.group)
        self._lengths = lengths
        self._upload()

    def blocks_at(self, columns: Int32Array) -> Int32Array:
        """For each sequence the block in its column of the table, ``[R]``."""
        blocks: Int32Array = self._host[np.arange(len(columns)), columns]
        return blocks

    def shared_prefixes(self, seq_ids: list[int], padding: int) -> tuple[mx.array, int]:
        """The argument of ``paged_attention`` for these sequences and rows of padding, and the
        sum of its lengths. It stays while they are the same sequences with the same first
        blocks."""
        known, version = self._shared, self._allocator.block_tables.version
        if known is None or known[0] != seq_ids or known[1] != padding:
            known = None
        if known is None or self._are_replaced(seq_ids, known[2]):
            found = np.zeros((2, len(seq_ids) + padding), np.int32)
            if self.cascade and len(seq_ids) > 1:
                tables, rows = self._allocator.block_tables, self._allocator.table_rows(seq_ids)
                lengths = tables.lengths(rows, self.group)
                entries = tables.rows(rows, self.group)
                common = common_prefixes(entries, lengths)
                common[1] *= self._allocator.block_size
                common[1, common[1] < FEWEST_SHARED] = 0
                found[:, : len(seq_ids)] = common
            self._shared = list(seq_ids), padding, version, (mx.array(found), int(found[1].sum()))
        assert self._shared is not None
        return self._shared[3]

    def _are_replaced(self, seq_ids: list[int], version: int) -> bool:
        """Whether blocks of these sequences were replaced after this version."""
        tables = self._allocator.block_tables
        if tables.version == version:
            return False
        return bool((tables.versions(self._allocator.table_rows(seq_ids)) > version).any())

    def _take_over(self, seq_ids: list[int]) -> None:
        tables = self._allocator.block_tables
        self._seq_ids = list(seq_ids)
        self._version = tables.version
        self._rows = self._allocator.table_rows(seq_ids)
        self._lengths = tables.lengths(self._rows, self.group)
        entries = tables.rows(self._rows, self.group)
        rows, width = entries.shape
        shape = rows, width + SPARE_COLUMNS
        if self.padded:
            shape = row_bucket(rows), column_bucket(width)
        self._host = np.zeros(shape, np.int32)
        self._host[:rows, :width] = entries
        self._upload()

    def _upload(self) -> None:
        # MLX copies a contiguous array much faster than columns of a wider one.
        host = self._host if self.padded else self._host[:, : self._lengths.max(initial=0)]
        tables = self._allocator.store.tables(host, self.group)
        self.arrays = of_members(np.ascontiguousarray(tables))


def of_members(values: Int32Array) -> list[mx.array]:
    """Host values ``[members, ...]`` as an array for each member."""
    return [mx.array(values[0])] if len(values) == 1 else list(mx.array(values))


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
