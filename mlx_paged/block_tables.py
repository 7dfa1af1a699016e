"""The block tables of all live sequences in one array. Knows no mlx."""

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class BlockTables:
    """Rows of physical block ids, one row a sequence.

    A step takes the tables of its sequences with one fancy index instead of building them from
    Python lists; appending a block writes one entry. Rows and columns double when they run out.
    """

    def __init__(self, num_rows: int = 64, num_columns: int = 64) -> None:
        self._entries: Int32Array = np.zeros((num_rows, num_columns), np.int32)
        self._lengths: Int32Array = np.zeros(num_rows, np.int32)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_rows_taken(self) -> int:
        return len(self._lengths) - len(self._free_rows)

    def add_row(self) -> int:
        """Take an empty row."""
        if not self._free_rows:
            num_rows = len(self._lengths)
            self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
            self._free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))
        return self._free_rows.pop()

    def release_row(self, row: int) -> None:
        self._lengths[row] = 0
        self._free_rows.append(row)

    def length(self, row: int) -> int:
        """Blocks in this row."""
        return int(self._lengths[row])

    def row(self, row: int) -> Int32Array:
        """The row's block ids, ``[length]``: a view that the next change may outdate."""
        return self._entries[row, : self._lengths[row]]

    def rows(self, rows: list[int] | Int32Array) -> Int32Array:
        """A copy of several rows, ``[len(rows), longest]``; past a row's end they mean nothing."""
        width = int(self._lengths[rows].max(initial=0))
        return self._entries[rows, :width]

    def extend(self, row: int, blocks: list[int]) -> None:
        start = self.length(row)
        stop = start + len(blocks)
        while stop > self._entries.shape[1]:
            self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)], axis=1)
        self._entries[row, start:stop] = blocks
        self._lengths[row] = stop

    def replace(self, row: int, index: int, block: int) -> None:
        self._entries[row, index] = block

    def copy_row(self, source: int, target: int) -> None:
        length = self.length(source)
        self._entries[target, :length] = self._entries[source, :length]
        self._lengths[target] = length
