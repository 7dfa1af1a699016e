"""Which sizes the graphs of compiled decodes have."""

from dataclasses import dataclass

import mlx.core as mx

from mlx_paged.ops.dispatch import LONG_CONTEXT, SHORT_CONTEXT

FEWEST_COLUMNS = 32  # of the narrowest bucket on a CPU


@dataclass(frozen=True, slots=True)
class Buckets:
    """Widths of block tables, in blocks, and what else a graph does not depend on.

    A CPU reads only the blocks of a context, so there are few widths, and each graph has shared
    prefixes. A GPU splits a context as its table's width says, and launches a kernel for shared
    prefixes wherever there may be some: so each width is at most twice the context, and graphs with
    shared prefixes are others than those without.
    """

    fewest: int  # columns of the narrowest bucket
    factor: int  # how many times a width the next one is
    always_shares: bool  # whether every graph has shared prefixes
    takes_ragged: bool  # whether there are graphs where each row of a sequence counts as one
    wide: int  # columns of the widest bucket that is tried before any is used

    @classmethod
    def of_device(cls, block_size: int) -> "Buckets":
        """The buckets of the default device."""
        if mx.default_device() == mx.cpu:
            return cls(FEWEST_COLUMNS, 4, True, True, FEWEST_COLUMNS)
        fewest = max(1, SHORT_CONTEXT // block_size)  # whose contexts are not split
        return cls(fewest, 2, False, False, 2 * LONG_CONTEXT // block_size)

    def width(self, columns: int) -> int:
        """The number of columns with padding."""
        width = self.fewest
        while width < columns:
            width *= self.factor
        return width

    def widths(self, most_columns: int) -> list[int]:
        """The widths of all buckets of tables with up to `most_columns` columns."""
        found = [self.width(1)]
        while found[-1] < most_columns:
            found.append(self.width(found[-1] + 1))
        return found
