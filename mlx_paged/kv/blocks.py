"""The blocks of a pool: in use, kept for reuse, or free. Knows no mlx."""

from collections.abc import Mapping, Sequence

from mlx_paged.kv.allocation import BlockCopy, OutOfBlocksError
from mlx_paged.kv.block_refs import BlockRefs
from mlx_paged.kv.prefix_cache import PrefixCache


class BlockStore:
    """Hands out blocks and takes them back; those of known content stay, as long as nobody needs
    their memory, for prompts that begin alike.

    Attributes:
        refs: who needs each block.
        prefixes: what is known of their content.
        cow_clones: copies asked for so far.
        evictions: known blocks handed out for other content so far.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.refs = BlockRefs(num_blocks)
        self.prefixes: PrefixCache = PrefixCache(num_blocks, block_size)
        self.cow_clones = 0
        self.evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: the free ones and the idle cached ones."""
        return len(self.refs.free) + self.prefixes.num_idle

    def require(self, needed: int, available: int | None = None) -> None:
        """Raise OutOfBlocksError if fewer than `needed` are available; default: all that are."""
        available = self.num_available if available is None else available
        if needed > available:
            raise OutOfBlocksError(needed, available)

    def take(self, num_blocks: int) -> list[int]:
        """Hand out free blocks, and where there are too few the idle ones unused longest."""
        blocks = self.refs.take(num_blocks)
        if len(blocks) < num_blocks:
            blocks += self.evict([None] * (num_blocks - len(blocks)))
        return blocks

    def evict(self, wanted: Sequence[int | None]) -> list[int]:
        """Hand out idle blocks: those `wanted`, None the one unused longest."""
        blocks = [self.prefixes.evict(block) for block in wanted]
        self.refs.hold(blocks)
        self.evictions += len(blocks)
        return blocks

    def copy(self, block: int) -> BlockCopy:
        """Take a block for the content of another; both stay until the copy is performed."""
        self.prefixes.set_busy(block)
        self.cow_clones += 1
        return self.refs.add_copy(block, self.take(1)[0])

    def copies_done(self) -> None:
        """No copy is pending any more."""
        self._settle(self.refs.copies_done())

    def retain(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            self.prefixes.set_busy(block)
        self.refs.hold(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Take a reference from each block."""
        self._settle(self.refs.release(blocks))

    def drop_idle(self) -> None:
        """Forget all known content that nobody holds."""
        while self.prefixes.num_idle:
            self.refs.put_back([self.prefixes.evict()])

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Assert that every block is free, cached or held, and that it has as many references as
        `held` says."""
        self.prefixes.check_integrity()
        self.refs.check_integrity(held)
        free = set(self.refs.free)
        for block in range(len(self.refs.counts)):
            is_held = held.get(block, 0) > 0 or block in self.refs.origins
            states = (block in free, self.prefixes.is_idle(block), is_held)
            assert sum(states) == 1, f"block {block} is (free, cached, held) = {states}"
            assert not (block in free and block in self.prefixes), "a free block is still cached"

    def _settle(self, blocks: list[int]) -> None:
        """Nobody needs these blocks: those of known content stay cached, the others are free."""
        self.refs.put_back(self.prefixes.set_idle(blocks))
