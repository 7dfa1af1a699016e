"""Which sequences of a forward begin with the same blocks: attention reads these blocks once."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import common_prefixes
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv.shapes import KVShape

FEWEST_SHARED = 64  # keys in common, over all sequences; ops are told of no fewer

FEWEST_SHARED_BYTES = 1 << 20
"""What a layer's common keys and values must save of a GPU's reads. Their launch runs beside that
of the other keys. Both, and the merge, first look for the common keys: eight loads, of which each
needs the one before, take 4 us at 0.5 us each. In that time a chip of 273 GB/s, a Pro, reads 1 MiB.
"""

SHARED_KEYS = "shared_keys"
"""Name of the figure of a step: keys that a sequence has in the same blocks as another one, in the
layer group with the most."""


def fewest_shared(shapes: Sequence[KVShape]) -> int:
    """The fewest keys in common, over all sequences, of which ops are told if layers store these
    shapes."""
    if mx.default_device() == mx.Device(mx.cpu):
        return FEWEST_SHARED
    most = max((shape.token_bytes for shape in shapes), default=1)
    return max(FEWEST_SHARED, -(-FEWEST_SHARED_BYTES // most))


class NoPrefixes:
    """Knows of no sequences that begin with the same blocks."""

    num_keys = 0
    """Keys that the latest sequences have in common."""

    def of(self, seq_ids: list[int], rows: int) -> mx.array | None:
        """The argument `shared_prefixes` of ``paged_attention``, ``[2, rows]`` int32, for sequences
        in the first rows; None: no key is named."""
        return None

    def note(self, figures: dict[str, int]) -> None:
        """Note in the figures of a step what was found last."""


class SharedPrefixes(NoPrefixes):
    """Finds which sequences begin with the same blocks, in one layer group.

    Args:
        fewest: keys in common, over all sequences, below which :meth:`of` names none.
    """

    def __init__(self, allocator: BlockAllocator, group: int, fewest: int) -> None:
        self._allocator = allocator
        self._group = group
        self._fewest = fewest
        self._seq_ids: list[int] = []
        self._rows = 0
        self._version = 0  # of the allocator's tables that were compared
        self._found = mx.zeros((2, 0), mx.int32)

    def of(self, seq_ids: list[int], rows: int) -> mx.array | None:
        """As :class:`NoPrefixes`. The array stays while the sequences are the same with the same
        first blocks."""
        allocator, version = self._allocator, self._version
        if (
            rows != self._rows
            or seq_ids != self._seq_ids
            or (
                allocator.block_tables.version != version
                and allocator.are_replaced(seq_ids, version)
            )
        ):
            self._compare(seq_ids, rows)
        return self._found if self.num_keys >= self._fewest else None

    def note(self, figures: dict[str, int]) -> None:
        if self.num_keys >= self._fewest:
            figures[SHARED_KEYS] = max(figures.get(SHARED_KEYS, 0), self.num_keys)

    def _compare(self, seq_ids: list[int], rows: int) -> None:
        allocator, group = self._allocator, self._group
        tables, found = allocator.block_tables, np.zeros((2, rows), np.int32)
        of_tables = allocator.table_rows(seq_ids)
        common = common_prefixes(tables.rows(of_tables, group), tables.lengths(of_tables, group))
        common[1] *= allocator.block_size
        found[:, : len(seq_ids)] = common
        self._seq_ids, self._rows, self._version = list(seq_ids), rows, tables.version
        self.num_keys, self._found = int(found[1].sum()), mx.array(found)


MakePrefixes = Callable[[BlockAllocator, int], NoPrefixes]
"""Makes what is known of the sequences of an allocator, in a layer group."""


def no_prefixes(allocator: BlockAllocator, group: int) -> NoPrefixes:
    """What is known of a layer group's sequences where nobody looks for common blocks."""
    return NoPrefixes()


def shared_in(pool: KVPool) -> MakePrefixes:
    """What looks for common blocks in a pool; a pool without layers has none."""
    if pool.n_layers == 0:
        return no_prefixes
    fewest = fewest_shared(pool.shapes)
    return lambda allocator, group: SharedPrefixes(allocator, group, fewest)
