"""The prefix caches of all layer groups together. Knows no mlx."""

from collections.abc import Sequence
from dataclasses import replace

from mlx_paged.kv.block_tables import BlockTables, SequenceBlocks
from mlx_paged.kv.blocks import BlockStore
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.prefix_cache import TOKEN_BYTES, PrefixCache, chain_hash, root_hash, token_bytes
from mlx_paged.kv.prefix_match import FullBlocks, MissReason, PrefixMatch, known_start, miss_reason
from mlx_paged.kv.snapshots import Snapshot
from mlx_paged.kv.stateful_prefix_cache import StatefulPrefixCache


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
        caches, size = self._store.prefixes, self._block_size
        if isinstance(caches[0], StatefulPrefixCache):
            match = caches[0].match(tokens, stop, root)
            (first,) = self._first_kept(len(match.hashes))
            return replace(match, blocks=[match.blocks[0][first:]])
        known, count, was_evicted = self._common_start(tokens, stop, root)
        blocks = [
            [block for i in range(first, count) if (block := known.found(cache, i)) is not None]
            for cache, first in zip(caches, self._first_kept(count), strict=True)
        ]
        left = token_bytes(tokens, count * size, min((count + 1) * size, stop))
        runs = [cache.longest_run(known.parent(count), left) for cache in caches]
        longest, length = runs[0]
        goes_on = longest is not None and len(longest.tokens) > length * TOKEN_BYTES
        min_run, run = caches[0].min_run, min(length for _, length in runs)
        tails = [block for block, _ in runs if block is not None and run >= min_run]
        run = run if tails else 0
        miss = miss_reason(min_run, count * size, stop, run, was_evicted, goes_on)
        return PrefixMatch(known.hashes[:count], blocks, tails, count * size + run, miss)

    def _common_start(
        self, tokens: Sequence[int], stop: int, root: bytes
    ) -> tuple[FullBlocks, int, bool]:
        """Full blocks of ``tokens[:stop]``, how many of them every group can reuse, and whether the
        next one was evicted."""
        caches = self._store.prefixes
        pairs = zip(caches, self._groups, strict=True)
        whole = [cache for cache, group in pairs if group.window is None]
        known, was_evicted = known_start(whole, tokens, stop, root, self._block_size)
        count = len(known.hashes)
        while (found := self._missing(known, count)) is not None:
            cache, count = found
            was_evicted = cache.was_evicted(known.hashes[count])
        return known, count, was_evicted

    def _missing(self, known: FullBlocks, count: int) -> tuple[PrefixCache, int] | None:
        """The cache of a group with a window that lacks one of the first `count` blocks that its
        group needs, and which one; None if there is none."""
        needed = zip(self._store.prefixes, self._groups, self._first_kept(count), strict=True)
        for cache, first in ((c, first) for c, group, first in needed if group.window):
            for index in range(count - 1, first - 1, -1):
                if known.found(cache, index) is None:
                    return cache, index
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
        (prefixes,) = self._store.prefixes
        assert isinstance(prefixes, StatefulPrefixCache)
        return prefixes.attach(sequence.prefix_hash(block), content, snapshot)
