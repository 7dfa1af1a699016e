"""Who owns which block: free list, reference counts, block tables, copy-on-write. Knows no mlx."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mlx_paged.arguments import MAX_INT32, integer
from mlx_paged.kv.block_tables import BlockTables, Int32Array, SequenceBlocks
from mlx_paged.kv.blocks import BlockCopy, BlockStore, BlockTransfer, ceil_div
from mlx_paged.kv.cached_block import CachedBlock
from mlx_paged.kv.eviction import EvictionOrder, WorthOrder
from mlx_paged.kv.group_prefixes import GroupPrefixes
from mlx_paged.kv.layer_groups import ONE_GROUP, LayerGroup
from mlx_paged.kv.prefix_cache import ROOT, chain_hash, root_hash
from mlx_paged.kv.prefix_match import NeededBlock, PrefixMatch
from mlx_paged.kv.retention import Retention
from mlx_paged.kv.state_kind import Move, NoStates, ReadAndLeft, State, StateKind, Text
from mlx_paged.kv.worth import TOKENS, TextWorth


class BlockAllocator:
    """Bookkeeping of a pool of `num_blocks` blocks with `block_size` token slots each.

    Every layer group has a block table of each sequence. :meth:`make_writable` adds entries and
    copies shared entries (copy-on-write), all or nothing. An entry is held by a sequence, or cached
    (no sequence holds it, its content is known), or only part of a copy that is not performed yet.
    All other blocks are free. :meth:`trim` releases the entries that a group's kind does not keep.

    The caller performs all copies of a step before any write, and then calls ``store.copies_done``.
    Until then no block of a copy is handed out again. A copy of a copy names the first source, so
    the copies of a step may be performed in any order.

    Args:
        groups: the layer groups.
        chunk: tokens that a sequence computes in a step at most.
        states: the kind of layers that keep states beside K/V; None: the model has none.
        make_order: makes the order in which known content is evicted, for a number of blocks.
        worth: of the parts of a text.

    Attributes:
        store: the blocks.
        block_tables: of all live sequences; :meth:`table_rows` says which row is whose.
        prefixes: which blocks hold which texts.
        prefix_hit_tokens: prompt tokens found in the prefix cache so far.
        states: the kind of the model's states.
        retention: keeps and forgets texts as callers say.
        worth: of the parts of a text.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Seq[LayerGroup] = ONE_GROUP,
        chunk: int = 0,
        states: StateKind | None = None,
        make_order: Callable[[int], EvictionOrder] = WorthOrder,
        worth: TextWorth = TOKENS,
    ) -> None:
        self.block_size = block_size = integer("Engine", "block_size", block_size, 1)
        max_blocks = MAX_INT32 // block_size  # slots are int32
        self.num_blocks = integer("Engine", "num_blocks", num_blocks, 1, max_blocks)
        self.groups = tuple(groups)
        self.chunk = chunk
        self.prefix_hit_tokens = 0
        self.worth = worth
        self.block_tables = BlockTables(len(self.groups))
        self._width = sum(group.width for group in self.groups)
        self.store = BlockStore(self.num_blocks, block_size, self.groups, make_order)
        self.states: StateKind = states or NoStates()
        ends = self.states.prefix_ends(self.store.prefixes)
        self.prefixes = GroupPrefixes(self.groups, self.store, self.block_tables, ends, worth)
        self.retention = Retention(self.store, self.prefixes)
        self._sequences: dict[int, SequenceBlocks] = {}

    def blocks_needed(self, num_tokens: int) -> int:
        """How many entries of one group hold `num_tokens` tokens."""
        return ceil_div(num_tokens, self.block_size)

    def max_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens holds at one time."""
        size = self.block_size
        return sum(group.max_blocks(num_tokens, self.chunk, size) for group in self.groups)

    def blocks_to_append(self, num_sequences: int) -> int:
        """The most blocks that `num_sequences` sequences need for one more token each."""
        return num_sequences * self._width

    @property
    def num_available(self) -> int:
        """How many blocks can be handed out now."""
        return self.store.num_available

    def cached_prefix(self, tokens: Seq[int], salt: bytes = ROOT) -> int:
        """How many leading tokens :meth:`admit` would find in the cache."""
        return self.prefixes.match(tokens, len(tokens), salt).num_cached

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def num_tokens(self, seq_id: int) -> int:
        return self._sequence(seq_id).num_tokens

    def table(self, seq_id: int, group: int = 0) -> Int32Array:
        """Physical block ids in logical order, ``[num_blocks_of_sequence]``: a view, not a copy."""
        return self.block_tables.row(self._sequence(seq_id).row, group)

    def table_rows(self, seq_ids: Seq[int]) -> Int32Array:
        """Which rows of the block tables are these sequences', ``[len(seq_ids)]``."""
        return np.array([self._sequence(seq_id).row for seq_id in seq_ids], np.int32)

    def are_replaced(self, seq_ids: Seq[int], version: int) -> bool:
        """Whether blocks of these sequences were replaced after this version of the tables."""
        tables = self.block_tables
        if tables.version == version:
            return False
        return bool((tables.versions(self.table_rows(seq_ids)) > version).any())

    def slots(self, seq_id: int, start: int, stop: int, group: int = 0) -> Int32Array:
        """The slots of positions [start, stop), ``block * block_size + offset``, in the layers that
        are the first member of their group."""
        positions = np.arange(start, stop, dtype=np.int32)
        entries = self.table(seq_id, group)[positions // self.block_size]
        slots: Int32Array = self.store.slots(entries, positions, group)[0]
        return slots

    @property
    def can_share(self) -> bool:
        """Whether prefixes can be reused."""
        return self.states.can_share

    def admit(
        self,
        seq_id: int,
        num_tokens: int,
        tokens: Seq[int] | None = None,  # the sequence's token ids; None: reuse nothing
        salt: bytes = ROOT,  # only sequences with the same salt share K/V
        spare: int = 0,  # blocks that must stay available
        gives_way: bool = False,  # whether what it adds to the known content is the first to go
    ) -> PrefixMatch:
        """Start a sequence that owns positions [0, num_tokens) and reuses a cached prefix.

        The sequence shares full blocks of the prefix. It copies one more block if enough leading
        tokens agree. The last token is never reused: its logits have to be computed. Groups that
        do not keep all tokens get blocks up to their `reach`; :meth:`make_writable` adds the
        others.

        Raises:
            ValueError: `seq_id` is in use.
            OutOfBlocksError: too few blocks; nothing changed.
        """
        if seq_id in self._sequences:
            raise ValueError(f"seq_id {seq_id} is in use: expected a new id")
        match, store = self.prefixes.match(tokens, num_tokens, salt), self.store
        num_full = len(match.hashes)
        blocks = [[entry.block for entry in entries] for entries in match.blocks]
        reach = [group.reach(match.num_cached, num_tokens, self.chunk) for group in self.groups]
        stops = [self.blocks_needed(num_tokens) for num_tokens in reach]
        needed = sum(
            group.width * (stop - num_full) for group, stop in zip(self.groups, stops, strict=True)
        )
        shared = [block for of_group in blocks for block in of_group if block in store.idle]
        available = store.num_available - sum(map(store.width_of, shared))
        store.require(needed + spare, available)

        row, root = self.block_tables.add_row(), root_hash(salt)
        firsts = [num_full - len(of_group) for of_group in blocks]
        sequence = SequenceBlocks(row, firsts, num_tokens, match.hashes, root, gives_way=gives_way)
        sequence.states = self.states.begin(match)
        self._sequences[seq_id] = sequence
        for of_group in blocks:
            store.retain(of_group)
        tails = [tail.block for tail in match.tails]
        idle_tails = [block for block in tails if block in store.idle]
        can_copy = needed + spare + sum(map(store.width_of, idle_tails)) <= available
        for block in idle_tails:  # all of them, before any block is taken
            if can_copy:
                store.hold_source(block)
            else:
                store.take_idle(block)
        self.prefixes.count_uses(match)
        copied = []
        for group, (of_group, stop) in enumerate(zip(blocks, stops, strict=True)):
            if tails and (can_copy or tails[group] not in idle_tails):
                copied.append(store.copy(tails[group], group))
                of_group.append(copied[-1])
            elif tails:
                of_group.append(tails[group])
            of_group += store.take(stop - firsts[group] - len(of_group), group)
            self.block_tables.extend(row, of_group, group, firsts[group])
        self.prefix_hit_tokens += match.num_cached
        return replace(match, copies=store.copies_to(copied))

    def make_writable(self, seq_id: int, start: int, stop: int) -> list[BlockCopy]:
        """Let the sequence write positions [start, stop): append blocks, copy shared ones. Returns
        the copies to perform, in order, before any write. Raises ValueError for an unknown sequence
        or a hole, OutOfBlocksError for too few blocks; nothing changed then."""
        sequence = self._sequence(seq_id)
        if sequence.private_start <= start < stop <= sequence.private_stop:
            sequence.num_tokens = max(sequence.num_tokens, stop)
            return []
        assert 0 <= start < stop, "an empty span"
        if start > sequence.num_tokens:
            raise ValueError(
                f"[make_writable] start is {start}, but sequence {seq_id} has "
                f"{sequence.num_tokens} tokens: expected start <= {sequence.num_tokens}"
            )
        first, last = start // self.block_size, self.blocks_needed(stop)
        assert first >= max(sequence.first_entries), "the block was released"
        copies = self._make_private(sequence, first, last)
        sequence.num_tokens = max(sequence.num_tokens, stop)
        sequence.private_start, sequence.private_stop = start, last * self.block_size
        return copies

    def append_each(
        self, seq_ids: Seq[int], positions: Seq[int]
    ) -> tuple[list[BlockCopy], list[ReadAndLeft] | None]:
        """Call :meth:`make_writable` and :meth:`advance` for one position of each sequence, all of
        them different. Returns the copies, and the moves; None: the model has no states. Raises
        OutOfBlocksError, and changes nothing, unless each may get a new entry."""
        self.store.require(len(seq_ids) * self._width)
        copies: list[BlockCopy] = []
        rows, columns = list[int](), list[int]()
        sequences, size = self._sequences, self.block_size
        for seq_id, position in zip(seq_ids, positions, strict=True):
            sequence = sequences[seq_id]
            if sequence.private_start <= position < sequence.private_stop:
                if position == sequence.num_tokens:
                    sequence.num_tokens += 1
            elif position == sequence.num_tokens and position % size == 0:
                sequence.num_tokens += 1
                sequence.private_start, sequence.private_stop = position, position + size
                rows.append(sequence.row)
                columns.append(position // size)
            else:
                copies += self.make_writable(seq_id, position, position + 1)
        if rows:
            for group in range(len(self.groups)):
                taken = self.store.take(len(rows), group)
                self.block_tables.append_each(rows, taken, columns, group)
        if not self.states.exist:
            return copies, None
        held = (sequences[seq_id].states for seq_id in seq_ids)
        return copies, self.states.advance_together(held, positions)

    def advance(
        self,
        seq_id: int,
        start: int,
        stop: int,
        is_sure: bool = True,  # whether all tokens are the sequence's own
        text: Text | None = None,  # as which later prompts may begin; None: no prefix is shared
    ) -> Move:
        """Plan that a span computes tokens ``[start, stop)``; returns what the span does to the
        sequence's states. The span has to begin at the state that it reads."""
        return self.states.advance(self._sequence(seq_id).states, start, stop, is_sure, text)

    def state(self, seq_id: int) -> State:
        """The newest state of a sequence of which all tokens are known to be its own."""
        return self.states.resumes(self._sequence(seq_id).states)

    def begins_at(self, seq_id: int, num_computed: int) -> int:
        """Where the next span of a sequence begins, of which `num_computed` tokens are computed."""
        return self.states.begins_at(self._sequence(seq_id).states, num_computed)

    def take_released(self) -> list[int]:
        """The ids of states that nobody has held since the call before."""
        released, self.states.released = self.states.released, []
        return released

    def take_rested(self) -> list[int]:
        """The ids of states that are only kept for later prompts since the call before."""
        rested, self.states.rested = self.states.rested, []
        return rested

    def fork(self, parent_seq_id: int, child_seq_id: int) -> None:
        """Start a sequence that shares each block with its parent until one of them writes it."""
        parent = self._sequence(parent_seq_id)
        if child_seq_id in self._sequences:
            raise ValueError(f"[fork] child_seq_id {child_seq_id} is in use: expected a new id")
        parent.private_stop = 0
        row = self.block_tables.add_row()
        firsts, hashes = list(parent.first_entries), list(parent.hashes)
        child = replace(parent, row=row, first_entries=firsts, hashes=hashes)
        child.states = self.states.fork(parent.states)
        self._sequences[child_seq_id] = child
        self.block_tables.copy_row(parent.row, child.row)
        for entries in self._held(child):
            self.store.retain(entries)

    def can_go_back(self, seq_id: int, position: int) -> bool:
        """Whether the sequence can be computed again from `position` on."""
        held = self._sequence(seq_id).states
        if not self.states.can_go_back(held, position):
            return False
        return self.can_continue(seq_id, self.states.first_needed(held, position))

    def can_continue(self, seq_id: int, position: int) -> bool:
        """Whether the sequence still has all tokens that a query at `position` sees."""
        size, firsts = self.block_size, self._sequence(seq_id).first_entries
        pairs = zip(self.groups, firsts, strict=True)
        return all(first * size <= group.kept_from(position + 1) for group, first in pairs)

    def register_prefix(self, seq_id: int, tokens: Seq[int], num_computed: int) -> None:
        """Make full blocks reusable; the K/V of ``tokens[:num_computed]`` is in the pool."""
        sequence = self._sequence(seq_id)
        assert num_computed <= min(len(tokens), sequence.num_tokens)
        self.prefixes.register(sequence, tokens, num_computed)
        self.states.offer(sequence.states, partial(self.prefixes.keep, sequence, tokens))

    def register_tail(self, seq_id: int, tokens: Seq[int], num_computed: int) -> None:
        """Make all blocks reusable, the last one even if it is not full, of a sequence that ends:
        the next turn of a conversation begins with these tokens."""
        self.register_prefix(seq_id, tokens, num_computed)
        self.prefixes.register_tail(self._sequence(seq_id), tokens, num_computed)

    def keep_end(self, seq_id: int, tokens: Seq[int]) -> None:
        """Let later texts go on from the end of a sequence, if its last block is registered."""
        sequence = self._sequence(seq_id)
        self.states.leave(sequence.states, partial(self.prefixes.keep, sequence, tokens))

    def leaving(self, block: CachedBlock) -> BlockTransfer | None:
        """What is kept after a full block that leaves the pool, beside its K/V."""
        return self.prefixes.ends.leaving(block)

    def adopt(self, needed: NeededBlock, payload: Any) -> BlockTransfer | None:
        """Let prefixes end at what is needed beside blocks, whose content `payload` has come from
        elsewhere. Returns the way of the content into the runner; None: it is not kept."""
        return self.prefixes.ends.adopt(needed, payload)

    def trim(self, seq_id: int, position: int, offers: bool = False) -> None:
        """Release the entries that no group's kind keeps when the sequence's next token is at
        `position`, or at its state before. The table still has these entries; they mean nothing.
        With `offers`, an entry that is not registered yet is kept."""
        sequence = self._sequence(seq_id)
        position = self.states.first_needed(sequence.states, position)
        for group_index, group in enumerate(self.groups):
            first = min(group.kept_from(position), sequence.num_tokens) // self.block_size
            if offers and sequence.is_reusable:
                first = min(first, len(sequence.hashes))
            before = sequence.first_entries[group_index]
            if first > before:
                row = self.block_tables.row(sequence.row, group_index)
                self.store.release(row[before:first].tolist())
                sequence.first_entries[group_index] = first
                sequence.private_start = max(sequence.private_start, first * self.block_size)

    def free(self, seq_id: int) -> None:
        """End a sequence. Blocks it held alone become free, or cached if their content is known."""
        sequence = self._sequence(seq_id)
        for entries in self._held(sequence):
            self.store.release(entries[::-1])  # a cached prefix is evicted from its end
        self.states.end(sequence.states)
        self.block_tables.release_row(sequence.row)
        del self._sequences[seq_id]

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Let the sequence own only positions ``[0, num_tokens)``, which are right. Blocks past
        them are released."""
        sequence, kept = self._sequence(seq_id), self.blocks_needed(num_tokens)
        self.states.settle(sequence.states, num_tokens)
        if num_tokens >= sequence.num_tokens:
            return
        assert kept >= max(sequence.first_entries), "the block was released"
        for group in range(len(self.groups)):
            self.store.release(self.block_tables.truncate(sequence.row, kept, group)[::-1])
        sequence.num_tokens = num_tokens
        sequence.private_start = sequence.private_stop = 0
        del sequence.hashes[num_tokens // self.block_size :]

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`; all others are used before them."""
        self.store.grow(num_blocks)
        self.num_blocks = num_blocks

    def compact(self, num_blocks: int) -> Int32Array:
        """Shrink to `num_blocks`, which the held blocks fit in, while no copy is pending. Held
        blocks, and idle ones as far as they fit, become the first ones. Returns the old number of
        each."""
        kept = self.store.compact(num_blocks)
        self.block_tables.renumber(kept)
        self.prefixes.renumber({old: new for new, old in enumerate(kept.tolist())})
        self.store.idle.renumber(num_blocks)
        self.num_blocks = num_blocks
        return kept

    def forget_prefixes(self) -> None:
        """Forget all cached content. No K/V so far is reused; live sequences keep their blocks."""
        self.store.drop_idle()
        for prefixes in self.store.prefixes:
            prefixes.clear()
        for sequence in self._sequences.values():
            sequence.is_reusable = False
        chain_hash.cache_clear()  # it has the tokens of prompts

    def check_integrity(self) -> None:
        """Assert that every block is free, cached or held, and that every reference is counted."""
        held: Counter[int] = Counter()
        for sequence in self._sequences.values():
            num_full = self.blocks_needed(sequence.num_tokens)
            first_private = sequence.private_start // self.block_size
            last_private = self.blocks_needed(sequence.private_stop)
            for group, entries in enumerate(self._held(sequence)):
                first = sequence.first_entries[group]
                num_missing = num_full - first - len(entries)
                assert num_missing >= 0 and (num_missing == 0 or not self.groups[group].keeps_all)
                assert len(set(entries)) == len(entries), "a sequence holds a block twice"
                for block in entries[max(0, first_private - first) : max(0, last_private - first)]:
                    assert self.store.counts[block] == 1
                    assert block not in self.store.prefixes[group]
                held.update(entries)
            assert len(sequence.hashes) <= sequence.num_tokens // self.block_size
        assert self.block_tables.num_rows_taken == len(self._sequences), "a table row is lost"
        self.prefixes.ends.check_integrity()
        self.store.check_integrity(held)
        self.states.check_integrity([each.states for each in self._sequences.values()])

    def _sequence(self, seq_id: int) -> SequenceBlocks:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise ValueError(f"seq_id {seq_id} is not known: expected a live sequence") from None

    def _make_private(self, sequence: SequenceBlocks, first: int, last: int) -> list[BlockCopy]:
        """Give the sequence entries ``[first, last)`` that no other sequence shares: copy shared
        ones, forget the others' content, append those that are missing. Raise OutOfBlocksError,
        and change nothing, if there are too few blocks."""
        store, tables, row = self.store, self.block_tables, sequence.row
        groups = range(len(self.groups))
        held: list[list[int]] = [tables.row(row, i)[first:last].tolist() for i in groups]
        missing = [max(0, last - tables.length(row, group)) for group in groups]
        store.require(
            sum(
                group.width * (sum(store.counts[block] > 1 for block in blocks) + count)
                for group, blocks, count in zip(self.groups, held, missing, strict=True)
            )
        )
        copied: list[int] = []
        for group, blocks in enumerate(held):
            shared = {i: block for i, block in enumerate(blocks, first) if store.counts[block] > 1}
            for block in blocks:
                if store.counts[block] == 1:
                    store.prefixes[group].forget(block)
            for i, block in shared.items():
                copied.append(store.copy(block, group))
                tables.replace(sequence.row, i, copied[-1], group)
            store.release(list(shared.values()))
            tables.extend(sequence.row, store.take(missing[group], group), group)
        del sequence.hashes[first:]
        return store.copies_to(copied)

    def _held(self, sequence: SequenceBlocks) -> list[list[int]]:
        """The sequence's entries in each group."""
        rows = [self.block_tables.row(sequence.row, group) for group in range(len(self.groups))]
        firsts = sequence.first_entries
        return [row[first:].tolist() for row, first in zip(rows, firsts, strict=True)]
