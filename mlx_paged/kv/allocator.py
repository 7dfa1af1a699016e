"""Who owns which block: free list, reference counts, block tables, copy-on-write. Knows no mlx."""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from mlx_paged.arguments import MAX_INT32, integer
from mlx_paged.kv.block_tables import BlockTables, Int32Array, SequenceBlocks
from mlx_paged.kv.blocks import BlockCopy, BlockStore, ceil_div
from mlx_paged.kv.prefix_cache import (
    ROOT,
    MissReason,
    PrefixMatch,
    chain_hash,
    root_hash,
    token_bytes,
)
from mlx_paged.kv.snapshots import Snapshot, Snapshots
from mlx_paged.kv.stateful_prefix_cache import StatefulPrefixCache


@dataclass(frozen=True, slots=True)
class Admission:
    """What a new sequence found in the prefix cache.

    Attributes:
        num_cached: leading tokens whose K/V is in its blocks after `copies`.
        copies: block copies to perform, in order, before any write.
        miss: why the reuse ended there; None if all that can be reused is.
        snapshot: the recurrent states after these tokens, if the model has any.
        prefix_without_state: length of a longer cached prefix that lacks its state; 0: none.
    """

    num_cached: int
    copies: list[BlockCopy]
    miss: MissReason | None
    snapshot: Snapshot | None = None
    prefix_without_state: int = 0


class BlockAllocator:
    """Bookkeeping of a pool of `num_blocks` blocks with `block_size` token slots each.

    :meth:`make_writable` adds blocks and copies shared ones (copy-on-write), all or nothing. A
    block is free, or cached (no reference, content known), or held by a sequence, or only part of
    a copy that is not performed yet.

    The caller performs all copies of a step before any write, and then calls :meth:`copies_done`.
    Until then no block of a copy is handed out again. A copy of a copy names the first source, so
    the copies of a step may be performed in any order.

    Attributes:
        block_tables: of all live sequences; :meth:`table_rows` says which row is whose.
        prefix_hit_tokens: prompt tokens found in the prefix cache so far.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size = integer("BlockAllocator", "block_size", block_size, 1)
        max_blocks = MAX_INT32 // block_size  # slots are int32
        self.num_blocks = integer("BlockAllocator", "num_blocks", num_blocks, 1, max_blocks)
        self.prefix_hit_tokens = 0
        self.block_tables = BlockTables()
        self._store = BlockStore(self.num_blocks, block_size)
        self._sequences: dict[int, SequenceBlocks] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: the free ones and the cached ones."""
        return self._store.num_available

    @property
    def num_cached(self) -> int:
        """Blocks without a reference whose content is kept for reuse."""
        return self._store.prefixes.num_idle

    @property
    def blocks_in_use(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def cow_clones(self) -> int:
        """Blocks copied on write so far."""
        return self._store.cow_clones

    @property
    def evictions(self) -> int:
        """Cached blocks that were handed out for other content so far."""
        return self._store.evictions

    @property
    def refcount_histogram(self) -> dict[int, int]:
        """How many blocks have how many references; free and cached blocks count under 0."""
        return dict(sorted(Counter(self._store.counts).items()))

    def blocks_needed(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)

    def cached_prefix(self, tokens: Seq[int], salt: bytes = ROOT) -> int:
        """How many leading tokens :meth:`admit` would find in the cache."""
        return self._match(len(tokens), tokens, salt).num_tokens

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def num_tokens(self, seq_id: int) -> int:
        return self._sequence(seq_id).num_tokens

    def table(self, seq_id: int) -> Int32Array:
        """Physical block ids in logical order, ``[num_blocks_of_sequence]``: a view, not a copy."""
        return self.block_tables.row(self._sequence(seq_id).row)

    def tables(self, seq_ids: Seq[int]) -> Int32Array:
        """Copy of several block tables, ``[len(seq_ids), longest]``; the kernels never read the
        entries past a sequence's own blocks."""
        return self.block_tables.rows(self.table_rows(seq_ids))

    def table_rows(self, seq_ids: Seq[int]) -> Int32Array:
        """Which rows of the block tables are these sequences', ``[len(seq_ids)]``."""
        return np.array([self._sequence(seq_id).row for seq_id in seq_ids], np.int32)

    def slots(self, seq_id: int, start: int, stop: int) -> Int32Array:
        """Slot of each position in [start, stop): ``block * block_size + offset``."""
        positions = np.arange(start, stop, dtype=np.int32)
        blocks = self.table(seq_id)[positions // self.block_size]
        return blocks * np.int32(self.block_size) + positions % np.int32(self.block_size)

    @property
    def snapshots(self) -> Snapshots | None:
        """Snapshots of recurrent states; None without :meth:`require_states`."""
        return self._store.prefixes.snapshots

    def require_states(self, max_snapshots: int) -> None:
        """Reuse prefixes only up to a kept snapshot of recurrent states, and keep at most
        `max_snapshots`."""
        self._store.prefixes = StatefulPrefixCache(self.num_blocks, self.block_size, max_snapshots)

    def admit(
        self,
        seq_id: int,
        num_tokens: int,
        tokens: Seq[int] | None = None,
        salt: bytes = ROOT,
        spare: int = 0,
    ) -> Admission:
        """Start a sequence that owns positions [0, num_tokens) and reuses a cached prefix.

        The sequence shares full blocks of the prefix. It copies one more block if enough leading
        tokens agree. The last token is never reused: its logits have to be computed.

        Args:
            tokens: the sequence's token ids; None: reuse nothing.
            salt: only sequences with the same salt share K/V.
            spare: blocks that must stay available.

        Raises:
            ValueError: `seq_id` is in use or `num_tokens` is negative.
            OutOfBlocksError: too few blocks; nothing changed.
        """
        if seq_id in self._sequences:
            raise ValueError(f"[admit] seq_id {seq_id} is in use: expected a new id")
        if num_tokens < 0:
            raise ValueError(f"[admit] num_tokens is {num_tokens}: expected >= 0")
        match = self._match(num_tokens, tokens, salt)
        blocks, hashes = [b.block for b in match.blocks], [b.hash for b in match.blocks]
        num_new = self.blocks_needed(num_tokens) - len(blocks)
        available = self.num_available - sum(map(self._store.prefixes.is_idle, blocks))
        self._store.require(num_new + spare, available)

        row = self.block_tables.add_row()
        self._sequences[seq_id] = SequenceBlocks(row, num_tokens, hashes, root_hash(salt))
        self._store.retain(blocks)
        copies = []
        if match.tail is not None:
            block = match.tail.block
            if num_new + spare == available and self._store.prefixes.is_idle(block):
                blocks.append(self._store.take_idle(block))  # no block is left for a copy of it
            else:
                copies.append(self._store.copy(block))
                blocks.append(copies[0].dst)
            num_new -= 1
        self.block_tables.extend(row, blocks + self._store.take(num_new))
        self.prefix_hit_tokens += match.num_tokens
        return Admission(
            match.num_tokens, copies, match.miss, match.snapshot, match.prefix_without_state
        )

    def make_writable(self, seq_id: int, start: int, stop: int) -> list[BlockCopy]:
        """Let the sequence write positions [start, stop): append blocks, copy shared ones.

        Returns:
            The block copies to perform, in order, before any write.

        Raises:
            ValueError: an unknown sequence, or a span that is empty or leaves a hole.
            OutOfBlocksError: too few blocks; nothing changed.
        """
        sequence = self._sequence(seq_id)
        if sequence.private_start <= start < stop <= sequence.private_stop:
            sequence.num_tokens = max(sequence.num_tokens, stop)
            return []
        if not 0 <= start < stop:
            raise ValueError(f"[make_writable] span [{start}, {stop}): expected 0 <= start < stop")
        if start > sequence.num_tokens:
            raise ValueError(
                f"[make_writable] start is {start}, but sequence {seq_id} has "
                f"{sequence.num_tokens} tokens: expected start <= {sequence.num_tokens}"
            )
        assert start >= sequence.first_block * self.block_size, "the block was released"
        first, last = start // self.block_size, self.blocks_needed(stop)
        num_missing = max(0, last - self.block_tables.length(sequence.row))
        copies = self._make_private(sequence, first, last, num_missing)
        self.block_tables.extend(sequence.row, self._store.take(num_missing))
        sequence.num_tokens = max(sequence.num_tokens, stop)
        sequence.private_start, sequence.private_stop = start, last * self.block_size
        return copies

    def append_each(self, seq_ids: Seq[int], positions: Seq[int]) -> list[BlockCopy]:
        """Call :meth:`make_writable` for one position of each sequence, all of them different.
        Raise OutOfBlocksError, and change nothing, unless one block a sequence is available."""
        self._store.require(len(seq_ids))
        copies: list[BlockCopy] = []
        growing: list[SequenceBlocks] = []
        sequences, size = self._sequences, self.block_size
        for seq_id, position in zip(seq_ids, positions, strict=True):
            sequence = sequences[seq_id]
            if sequence.private_start <= position < sequence.private_stop:
                if position == sequence.num_tokens:
                    sequence.num_tokens += 1
            elif position == sequence.num_tokens and position % size == 0:
                sequence.num_tokens += 1
                sequence.private_start, sequence.private_stop = position, position + size
                growing.append(sequence)
            else:
                copies += self.make_writable(seq_id, position, position + 1)
        if growing:
            self.block_tables.append_each([s.row for s in growing], self._store.take(len(growing)))
        return copies

    def copies_done(self) -> None:
        """The caller performed all copies, or queued them ahead of every later write."""
        self._store.copies_done()

    def fork(self, parent_seq_id: int, child_seq_id: int) -> None:
        """Start a sequence that shares each block with its parent until one of them writes it."""
        parent = self._sequence(parent_seq_id)
        if child_seq_id in self._sequences:
            raise ValueError(f"[fork] child_seq_id {child_seq_id} is in use: expected a new id")
        parent.private_stop = 0
        child = replace(parent, row=self.block_tables.add_row(), hashes=list(parent.hashes))
        self._sequences[child_seq_id] = child
        self.block_tables.copy_row(parent.row, child.row)
        self._store.retain(self._held(child))

    def register_prefix(self, seq_id: int, tokens: Seq[int], num_computed: int) -> None:
        """Make full blocks reusable; the K/V of ``tokens[:num_computed]`` is in the pool."""
        sequence = self._sequence(seq_id)
        assert num_computed <= min(len(tokens), sequence.num_tokens)
        if not sequence.is_reusable:
            return
        parent = sequence.prefix_hash(len(sequence.hashes))
        row, size = self.block_tables.row(sequence.row), self.block_size
        for i in range(len(sequence.hashes), num_computed // size):
            content = token_bytes(tokens, i * size, (i + 1) * size)
            if i < sequence.first_block:
                parent = chain_hash(parent, content)
            else:
                parent = self._store.prefixes.register(int(row[i]), parent, content)
            sequence.hashes.append(parent)
            sequence.private_start = max(sequence.private_start, (i + 1) * size)

    def register_tail(self, seq_id: int, tokens: Seq[int], num_computed: int) -> None:
        """Make all blocks reusable, the last one even if it is not full.

        For a sequence that ends: the next turn of a conversation begins with these tokens.
        """
        self.register_prefix(seq_id, tokens, num_computed)
        sequence = self._sequence(seq_id)
        last, num_filled = divmod(num_computed, self.block_size)
        if not sequence.is_reusable or num_filled == 0:
            return
        block = int(self.block_tables.row(sequence.row)[last])
        content = token_bytes(tokens, num_computed - num_filled, num_computed)
        self._store.prefixes.register_tail(block, sequence.prefix_hash(last), content)
        sequence.private_stop = 0

    def attach_snapshot(self, seq_id: int, tokens: Seq[int], snapshot: Snapshot) -> bool:
        """Keep a snapshot of the sequence's states if its block is registered and has no snapshot
        at this position yet."""
        sequence, size = self._sequence(seq_id), self.block_size
        block = (snapshot.position - 1) // size
        if not sequence.is_reusable or len(sequence.hashes) < block:
            return False
        content = token_bytes(tokens, block * size, snapshot.position)
        assert isinstance(self._store.prefixes, StatefulPrefixCache)
        return self._store.prefixes.attach(sequence.prefix_hash(block), content, snapshot)

    def trim(self, seq_id: int, position: int, offers: bool = False) -> None:
        """Release the blocks before `position`, which a sliding window has left. Their entries stay
        in the table and mean nothing. With `offers`, blocks that are not registered yet stay."""
        sequence = self._sequence(seq_id)
        first = min(position, sequence.num_tokens) // self.block_size
        if offers and sequence.is_reusable:
            first = min(first, len(sequence.hashes))
        if first > sequence.first_block:
            row = self.block_tables.row(sequence.row)
            self._store.release(row[sequence.first_block : first].tolist())
            sequence.first_block = first
            sequence.private_start = max(sequence.private_start, first * self.block_size)

    def free(self, seq_id: int) -> None:
        """End a sequence. Blocks it held alone become free, or cached if their content is known."""
        sequence = self._sequence(seq_id)
        self._store.release(self._held(sequence)[::-1])  # a cached prefix is evicted from its end
        self.block_tables.release_row(sequence.row)
        del self._sequences[seq_id]

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Let the sequence own only positions [0, num_tokens); blocks past them are released."""
        assert num_tokens >= 0
        sequence = self._sequence(seq_id)
        if num_tokens >= sequence.num_tokens:
            return
        kept = self.blocks_needed(num_tokens)
        released = self.block_tables.truncate(sequence.row, kept)
        sequence.num_tokens = num_tokens
        sequence.private_start = sequence.private_stop = 0
        del sequence.hashes[num_tokens // self.block_size :]
        self._store.release(released[::-1])

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`; all others are used before them."""
        assert num_blocks >= self.num_blocks
        self._store.grow(num_blocks)
        self.num_blocks = num_blocks

    def drop_cached(self) -> None:
        """Forget all cached content that no sequence holds."""
        self._store.drop_idle()

    def forget_prefixes(self) -> None:
        """Forget all cached content. No K/V written so far is reused; live sequences keep their
        blocks."""
        self.drop_cached()
        self._store.prefixes = self._store.prefixes.emptied()
        for sequence in self._sequences.values():
            sequence.is_reusable = False

    def check_integrity(self) -> None:
        """Assert that every block is free, cached or held, and that every reference is counted."""
        held: Counter[int] = Counter()
        for sequence in self._sequences.values():
            row = self.block_tables.row(sequence.row).tolist()
            assert len(row) == self.blocks_needed(sequence.num_tokens) >= sequence.first_block
            blocks = row[sequence.first_block :]
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            first, last = sequence.private_start, sequence.private_stop
            for block in row[first // self.block_size : self.blocks_needed(last)]:
                assert self._store.counts[block] == 1 and block not in self._store.prefixes
            assert len(sequence.hashes) <= sequence.num_tokens // self.block_size
            held.update(blocks)
        assert self.block_tables.num_rows_taken == len(self._sequences), "a table row is lost"
        self._store.check_integrity(held)

    def _match(self, num_tokens: int, tokens: Seq[int] | None, salt: bytes) -> PrefixMatch:
        if tokens is None:
            return PrefixMatch([], None, 0, MissReason.DISABLED)
        stop = max(0, min(num_tokens, len(tokens)) - 1)
        return self._store.prefixes.match(tokens, stop, root_hash(salt))

    def _sequence(self, seq_id: int) -> SequenceBlocks:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise ValueError(f"seq_id {seq_id} is not known: expected a live sequence") from None

    def _make_private(
        self, sequence: SequenceBlocks, first: int, last: int, num_missing: int
    ) -> list[BlockCopy]:
        """Copy those of the sequence's blocks ``[first, last)`` that are shared; forget the others'
        content. Raise OutOfBlocksError unless `num_missing` more blocks are available."""
        store = self._store
        table: list[int] = self.block_tables.row(sequence.row)[first:last].tolist()
        shared = {i: block for i, block in enumerate(table, first) if store.counts[block] > 1}
        owned = [block for block in table if store.counts[block] == 1]
        store.require(len(shared) + num_missing)
        copies = [store.copy(block) for block in shared.values()]
        for i, copy in zip(shared, copies, strict=True):
            self.block_tables.replace(sequence.row, i, copy.dst)
        store.release(list(shared.values()))
        for block in owned:
            store.prefixes.forget(block)
        del sequence.hashes[first:]
        return copies

    def _held(self, sequence: SequenceBlocks) -> list[int]:
        blocks: list[int] = self.block_tables.row(sequence.row)[sequence.first_block :].tolist()
        return blocks
