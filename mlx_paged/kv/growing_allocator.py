"""Block bookkeeping of a pool that grows and of sequences that are cut back. Knows no mlx."""

from mlx_paged.kv.allocator import BlockAllocator


class GrowingAllocator(BlockAllocator):
    """A :class:`BlockAllocator` whose pool may grow and whose sequences may shrink.

    Blocks are handed out in ascending order, freed ones first, so that a sequence written alone
    lies in one run of blocks.
    """

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`; they are used after all others."""
        assert num_blocks >= self.num_blocks
        self._store.refs.grow(num_blocks)
        self.num_blocks = num_blocks

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Let the sequence own only positions [0, num_tokens); blocks past them are given back."""
        assert num_tokens >= 0
        sequence = self._sequence(seq_id)
        if num_tokens >= sequence.num_tokens:
            return
        blocks = self._tables.row(sequence.row).tolist()
        kept = self.blocks_needed(num_tokens)
        self._tables.release_row(sequence.row)
        sequence.row = self._tables.add_row()
        self._tables.extend(sequence.row, blocks[:kept])
        sequence.num_tokens = num_tokens
        sequence.private_start = sequence.private_stop = 0
        del sequence.hashes[num_tokens // self.block_size :]
        self._store.release(blocks[kept:][::-1])
