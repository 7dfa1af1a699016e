"""How many sequences hold each block, and which blocks are free. Knows no mlx."""

from collections import Counter
from collections.abc import Mapping, Sequence


class BlockRefs:
    """Reference counts of all blocks, and a stack of free ones, on top those freed last.

    A block without a reference is free only once it is given to :meth:`put_back`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks - 1, -1, -1))
        self.counts = [0] * num_blocks

    @property
    def histogram(self) -> dict[int, int]:
        """How many blocks have how many references."""
        return dict(sorted(Counter(self.counts).items()))

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`; they are used after all others."""
        self.free[:0] = range(num_blocks - 1, len(self.counts) - 1, -1)
        self.counts += [0] * (num_blocks - len(self.counts))

    def take(self, num_blocks: int) -> list[int]:
        """Hand out free blocks, as many as there are of `num_blocks`, with a reference each."""
        num_left = max(0, len(self.free) - num_blocks)
        taken = self.free[num_left:]
        del self.free[num_left:]
        taken.reverse()
        self.hold(taken)
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        counts = self.counts
        for block in blocks:
            counts[block] += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Take a reference from each block; returns those that have none left."""
        counts, unheld = self.counts, []
        for block in blocks:
            count = counts[block] = counts[block] - 1
            if count == 0:
                unheld.append(block)
        return unheld

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Assert that no block is free twice and that blocks have as many references as `held`
        says; 0 where it says nothing."""
        assert len(set(self.free)) == len(self.free), "a block is free twice"
        for block, count in enumerate(self.counts):
            assert count == held.get(block, 0), "a reference is not counted"

    def put_back(self, blocks: Sequence[int]) -> None:
        """These are free."""
        self.free += blocks
