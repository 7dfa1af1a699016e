"""Who needs each block, and which blocks are free. Knows no mlx."""

from collections import Counter
from collections.abc import Mapping, Sequence

from mlx_paged.kv.allocation import BlockCopy


class BlockRefs:
    """Reference counts of all blocks, copies still to be performed, and a stack of free blocks.

    A block that neither a sequence nor a copy needs is free once it is given to :meth:`put_back`.

    Attributes:
        free: those freed last at the end, from where they are taken.
        counts: how many sequences hold each block.
        origins: of every block in a pending copy, the one whose content it gets: a source its own.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks - 1, -1, -1))
        self.counts = [0] * num_blocks
        self.origins: dict[int, int] = {}

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
        for block in taken:
            self.counts[block] = 1
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        counts = self.counts
        for block in blocks:
            counts[block] += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Take a reference from each block; returns those that nobody needs any more."""
        counts, unheld = self.counts, []
        for block in blocks:
            count = counts[block] = counts[block] - 1
            if not count:
                unheld.append(block)
        return [b for b in unheld if b not in self.origins] if self.origins else unheld

    def add_copy(self, block: int, target: int) -> BlockCopy:
        """Let `target` get the content of `block`, once the pending copies are performed."""
        source = self.origins.setdefault(block, block)
        self.origins[target] = source
        return BlockCopy(source, target)

    def copies_done(self) -> list[int]:
        """No copy is pending any more; returns the blocks that only copies needed."""
        pending, self.origins = self.origins, {}
        return [block for block in pending if self.counts[block] == 0]

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Assert that no block is free twice and that blocks have as many references as `held`
        says; 0 where it says nothing."""
        assert len(set(self.free)) == len(self.free), "a block is free twice"
        for block, count in enumerate(self.counts):
            assert count == held.get(block, 0), "a reference is not counted"
        for block, source in self.origins.items():
            assert 0 <= block < len(self.counts) and self.origins.get(source) == source

    def put_back(self, blocks: Sequence[int]) -> None:
        """These are free."""
        self.free += blocks
