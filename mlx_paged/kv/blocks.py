"""The blocks of a pool: in use, kept for reuse, or free. Knows no mlx."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_paged.kv.prefix_cache import PrefixCache


class OutOfBlocksError(RuntimeError):
    """The pool cannot give the blocks that were asked for; nothing was changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {available} available")
        self.needed = needed
        self.available = available


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: the content of block `src` goes to block `dst` before anything is written."""

    src: int
    dst: int


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


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
