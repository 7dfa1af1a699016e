"""The blocks of a pool: in use, kept for reuse, or free. Knows no mlx."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_paged.kv.prefix_cache import PrefixCache


class OutOfBlocksError(RuntimeError):
    """The pool has fewer available blocks than a call needs; the call changed nothing."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {available} available")
        self.needed = needed
        self.available = available


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: copy the content of block `src` to block `dst` before any write."""

    src: int
    dst: int


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class BlockStore:
    """Hands out blocks and takes them back. A released block whose content is known stays idle in
    the prefix cache until its memory is needed.

    Attributes:
        free: a stack of free blocks; the last one is taken first.
        counts: how many sequences hold each block.
        origins: for each block in a pending copy the block whose content it gets; a source maps to
            itself.
        prefixes: what is known of the blocks' content.
        cow_clones: copies so far.
        evictions: idle blocks handed out for other content so far.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free = list(range(num_blocks - 1, -1, -1))
        self.counts = [0] * num_blocks
        self.origins: dict[int, int] = {}
        self.prefixes: PrefixCache = PrefixCache(num_blocks, block_size)
        self.cow_clones = 0
        self.evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: the free ones and the idle cached ones."""
        return len(self.free) + self.prefixes.num_idle

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`; all others are used before them."""
        self.free[:0] = range(num_blocks - 1, len(self.counts) - 1, -1)
        self.counts += [0] * (num_blocks - len(self.counts))

    def require(self, needed: int, available: int | None = None) -> None:
        """Raise OutOfBlocksError if `needed` exceeds `available`, by default `num_available`."""
        available = self.num_available if available is None else available
        if needed > available:
            raise OutOfBlocksError(needed, available)

    def take(self, num_blocks: int) -> list[int]:
        """Hand out blocks with one reference each: free ones, then the idle ones unused longest."""
        num_left = max(0, len(self.free) - num_blocks)
        blocks = self.free[num_left:]
        del self.free[num_left:]
        blocks.reverse()
        while len(blocks) < num_blocks:
            blocks.append(self.prefixes.evict())
            self.evictions += 1
        for block in blocks:
            self.counts[block] = 1
        return blocks

    def take_idle(self, block: int) -> int:
        """Hand out this idle block with one reference."""
        self.evictions += 1
        self.counts[block] = 1
        return self.prefixes.evict(block)

    def copy(self, block: int) -> BlockCopy:
        """Take a block for the content of another; both stay until the copy is performed."""
        self.prefixes.set_busy(block)
        self.cow_clones += 1
        source = self.origins.setdefault(block, block)
        (target,) = self.take(1)
        self.origins[target] = source
        return BlockCopy(source, target)

    def copies_done(self) -> None:
        """No copy is pending any more."""
        pending, self.origins = self.origins, {}
        self._settle([block for block in pending if self.counts[block] == 0])

    def retain(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            self.prefixes.set_busy(block)
            self.counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take a reference from each block."""
        counts, unheld = self.counts, []
        for block in blocks:
            count = counts[block] = counts[block] - 1
            if not count:
                unheld.append(block)
        self._settle([b for b in unheld if b not in self.origins] if self.origins else unheld)

    def drop_idle(self) -> None:
        """Forget all known content that no sequence holds."""
        while self.prefixes.num_idle:
            self.free.append(self.prefixes.evict())

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Assert that every block is free, cached or held, and that it has as many references as
        `held` says; 0 where it says nothing."""
        self.prefixes.check_integrity()
        free = set(self.free)
        assert len(free) == len(self.free), "a block is free twice"
        for block, source in self.origins.items():
            assert 0 <= block < len(self.counts) and self.origins.get(source) == source
        for block, count in enumerate(self.counts):
            assert count == held.get(block, 0), "a reference is not counted"
            is_held = count > 0 or block in self.origins
            states = (block in free, self.prefixes.is_idle(block), is_held)
            assert sum(states) == 1, f"block {block} is (free, cached, held) = {states}"
            assert not (block in free and block in self.prefixes), "a free block is still cached"

    def _settle(self, blocks: list[int]) -> None:
        """No sequence or copy needs these blocks: those of known content become idle, the others
        free."""
        self.free += self.prefixes.set_idle(blocks)
