"""The prefix caches of all layer groups together. Knows no mlx."""

from collections.abc import Container, Sequence

from mlx_paged.kv.block_tables import BlockTables, SequenceBlocks
from mlx_paged.kv.blocks import BlockStore
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.prefix_cache import (
    TOKEN_BYTES,
    CachedBlock,
    chain_hash,
    root_hash,
    smallest_run,
    token_bytes,
)
from mlx_paged.kv.prefix_match import (
    AbsentBlock,
    MissReason,
    PrefixMatch,
    block_key,
    miss_reason,
)
from mlx_paged.kv.snapshots import Snapshot
from mlx_paged.kv.stateful_prefix_cache import StatefulPrefixCache

ELSEWHERE = CachedBlock(-1, b"", b"", b"")
"""Stands for a block that is not in the pool."""


class GroupPrefixes:
    """Registers the blocks of sequences in the prefix cache of each layer group, and finds them.

    A group without a window needs all blocks of a prefix. A group with a window needs those that a
    sequence keeps. So a prefix is reused up to a position where every group has what it needs.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], store: BlockStore, tables: BlockTables
    ) -> None:
        self._groups = groups
        self._store = store
        self._tables = tables
        self._block_size = store.prefixes[0].block_size
        self._min_run = smallest_run(self._block_size)

    def require_states(self, max_snapshots: int) -> None:
        """Reuse prefixes only up to a snapshot of recurrent states."""
        assert len(self._groups) == 1
        args = len(self._store.counts), self._block_size, self._store.idle
        self._store.prefixes = [StatefulPrefixCache(*args, max_snapshots)]

    def forget_all(self) -> None:
        for prefixes in self._store.prefixes:
            prefixes.clear()

    def match(self, tokens: Sequence[int] | None, num_tokens: int, salt: bytes) -> PrefixMatch:
        """The longest reusable prefix of ``tokens[:num_tokens]``, without the last token. None: no
        tokens are known."""
        if tokens is None:
            return PrefixMatch([], [[] for _ in self._groups], [], 0, MissReason.DISABLED)
        stop, root = max(0, min(num_tokens, len(tokens)) - 1), root_hash(salt)
        caches, size, min_run = self._store.prefixes, self._block_size, self._min_run
        hashes, found, was_evicted = self._full_blocks(tokens, stop, root)
        whole = len(hashes) * size
        left = token_bytes(tokens, whole, min(whole + size, stop))
        runs = [cache.longest_run(hashes[-1] if hashes else root, left) for cache in caches]
        longest, length = runs[0]
        goes_on = longest is not None and len(longest.tokens) > length * TOKEN_BYTES
        run = min(length for _, length in runs)
        run = run if run >= min_run else 0
        tails = [block for block, _ in runs if block is not None and run]
        miss = miss_reason(min_run, whole, stop, run, was_evicted, goes_on)
        position, snapshot = whole + run, None
        if isinstance(caches[0], StatefulPrefixCache):
            args = position, stop, was_evicted, goes_on
            position, tails, snapshot = caches[0].latest_state(hashes, tokens, stop, root)
            miss = caches[0].miss_reason(position, *args)
        count = position // size
        blocks = [
            [block for block in of_group[first:count] if block is not None]
            for of_group, first in zip(found, self._first_kept(count), strict=True)
        ]
        without_state = whole if whole > position else 0
        hashes = hashes[:count]
        return PrefixMatch(hashes, blocks, tails, position, miss, snapshot, without_state)

    def absent(
        self, tokens: Sequence[int], salt: bytes, elsewhere: Container[bytes]
    ) -> tuple[list[CachedBlock], list[AbsentBlock]]:
        """What a prompt could reuse if the blocks were in the pool whose keys are `elsewhere`: the
        blocks that are, and those that are not, in order. Both are empty if this is no more than
        it can reuse anyway."""
        stop, root, size = len(tokens) - 1, root_hash(salt), self._block_size
        hashes, found, _ = self._full_blocks(tokens, stop, root, elsewhere)
        count, cache = len(hashes), self._store.prefixes[0]
        held: list[CachedBlock] = []
        absent: list[AbsentBlock] = []
        if isinstance(cache, StatefulPrefixCache):
            states = [i for i, key in enumerate(hashes, 1) if block_key(key, None) in elsewhere]
            count = max(states, default=0)
            in_pool = found[0].index(ELSEWHERE) if ELSEWHERE in found[0] else len(hashes)
            if count * size <= cache.latest_state(hashes[:in_pool], tokens, stop, root)[0]:
                return [], []
        first_kept = self._first_kept(count)
        for i in range(count):
            parent = hashes[i - 1] if i else root
            content = token_bytes(tokens, i * size, (i + 1) * size)
            groups: list[int | None] = [g for g, first in enumerate(first_kept) if i >= first]
            if cache.snapshots is not None and i == count - 1:
                groups.append(None)
            for group in groups:
                block = ELSEWHERE if group is None else found[group][i]
                if block is None or block is ELSEWHERE:
                    key = block_key(hashes[i], group)
                    absent.append(AbsentBlock(key, i, group, hashes[i], parent, content))
                else:
                    held.append(block)
        return (held, absent) if absent else ([], [])

    def _full_blocks(
        self,
        tokens: Sequence[int],
        stop: int,
        root: bytes,
        elsewhere: Container[bytes] | None = None,
    ) -> tuple[list[bytes], list[list[CachedBlock | None]], bool]:
        """Hashes of the full blocks of ``tokens[:stop]`` that every group can reuse, each group's
        blocks of this content, and whether the next block was evicted."""
        caches, size, parent = self._store.prefixes, self._block_size, root
        hashes: list[bytes] = []
        found: list[list[CachedBlock | None]] = [[] for _ in caches]
        pairs = zip(self._groups, found, strict=True)
        has_states = caches[0].snapshots is not None
        complete = [blocks for group, blocks in pairs if group.window is None or has_states]
        for start in range(0, stop - size + 1, size):
            content = token_bytes(tokens, start, start + size)
            hashes.append(chain_hash(parent, content))
            for group, (cache, blocks) in enumerate(zip(caches, found, strict=True)):
                block = cache.find(hashes[-1], parent, content)
                if (
                    block is None
                    and elsewhere is not None
                    and block_key(hashes[-1], group) in elsewhere
                ):
                    block = ELSEWHERE
                blocks.append(block)
            if not all([blocks[-1] for blocks in complete]):
                break
            parent = hashes[-1]
        count = len(hashes)
        while (missing := self._missing(found, count)) is not None:
            count = missing
        next_one = hashes[count : count + 1]
        was_evicted = any(cache.was_evicted(key) for key in next_one for cache in caches)
        return hashes[:count], found, was_evicted

    def _missing(self, found: list[list[CachedBlock | None]], count: int) -> int | None:
        """One of the first `count` blocks that a group needs and lacks; None if there is none."""
        for blocks, first in zip(found, self._first_kept(count), strict=True):
            needed = blocks[first:count]
            if not all(needed):
                return first + needed.index(None)
        return None

    def _first_kept(self, count: int) -> list[int]:
        """For each group the first block that a sequence of `count` full blocks keeps."""
        size = self._block_size
        return [group.kept_from(count * size) // size for group in self._groups]

    def register(self, sequence: SequenceBlocks, tokens: Sequence[int], num_computed: int) -> None:
        """Make the sequence's full blocks reusable, whose K/V is in the pool."""
        if not sequence.is_reusable:
            return
        parent, size = sequence.prefix_hash(len(sequence.hashes)), self._block_size
        tables = [self._tables.row(sequence.row, group) for group in range(len(self._groups))]
        for i in range(len(sequence.hashes), num_computed // size):
            content = token_bytes(tokens, i * size, (i + 1) * size)
            key = chain_hash(parent, content)
            for group, first in enumerate(sequence.first_entries):
                if i >= first:
                    block = int(tables[group][i])
                    self._store.prefixes[group].register(block, key, parent, content)
            sequence.hashes.append(key)
            sequence.private_start = max(sequence.private_start, (i + 1) * size)
            parent = key

    def register_tail(
        self, sequence: SequenceBlocks, tokens: Sequence[int], num_computed: int
    ) -> None:
        """Make the sequence's last block reusable, which is not full."""
        last, num_filled = divmod(num_computed, self._block_size)
        if not sequence.is_reusable or num_filled == 0:
            return
        content = token_bytes(tokens, num_computed - num_filled, num_computed)
        for group, prefixes in enumerate(self._store.prefixes):
            block = int(self._tables.row(sequence.row, group)[last])
            prefixes.register_tail(block, sequence.prefix_hash(last), content)
        sequence.private_stop = 0

    def attach(self, sequence: SequenceBlocks, tokens: Sequence[int], snapshot: Snapshot) -> bool:
        """Keep a snapshot of the sequence's states if its block is known and has none there."""
        size = self._block_size
        block = (snapshot.position - 1) // size
        if not sequence.is_reusable or len(sequence.hashes) < block:
            return False
        content = token_bytes(tokens, block * size, snapshot.position)
        return self.attach_at(sequence.prefix_hash(block), content, snapshot)

    def attach_at(self, parent: bytes, tokens: bytes, snapshot: Snapshot) -> bool:
        """Keep a snapshot of the states after `tokens`, the last ones of its block."""
        (prefixes,) = self._store.prefixes
        assert isinstance(prefixes, StatefulPrefixCache)
        return prefixes.attach(parent, tokens, snapshot)
