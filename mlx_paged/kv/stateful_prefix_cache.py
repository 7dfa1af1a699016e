"""The prefix cache of a model with recurrent layers. Knows no mlx."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

from mlx_paged.kv.prefix_cache import (
    ROOT,
    TOKEN_BYTES,
    CachedBlock,
    PrefixCache,
    chain_hash,
    common_tokens,
    smallest_run,
    token_bytes,
)
from mlx_paged.kv.prefix_match import MissReason, PrefixMatch, known_start, miss_reason
from mlx_paged.kv.snapshots import Snapshot, Snapshots


class StatefulPrefixCache(PrefixCache):
    """Blocks of known content, reusable only up to a snapshot of the recurrent states.

    K/V can be read from its start to any position, but a state exists at one position only. So a
    reused prefix ends at a snapshot, within a block if necessary. A run of any length is then worth
    a copy. The blocks of a model without K/V hold nothing and only count its tokens.
    """

    def __init__(
        self, num_blocks: int, block_size: int, idle: OrderedDict[int, None], max_snapshots: int
    ) -> None:
        super().__init__(num_blocks, block_size, idle)
        self.min_run = 1
        self.snapshots: Snapshots = Snapshots(max_snapshots)
        self._min_copied_run = smallest_run(block_size)

    def attach(self, parent: bytes, tokens: bytes, snapshot: Snapshot) -> bool:
        """Keep a snapshot of the states after `tokens`, a block or its first tokens after `parent`.
        Returns False if their K/V is not known or they have a snapshot."""
        entry = self._by_hash.get(chain_hash(parent, tokens))
        if entry is None:
            siblings = self._siblings(parent)
            entry = next((e for e in siblings if e.tokens.startswith(tokens)), None)
        if entry is None:
            return False
        return self.snapshots.add(entry.block, len(tokens) // TOKEN_BYTES, snapshot)

    def match(self, tokens: Sequence[int], stop: int, root: bytes = ROOT) -> PrefixMatch:
        """The longest prefix of ``tokens[:stop]`` after `root` that ends at a snapshot."""
        size = self.block_size
        start, was_evicted = known_start([self], tokens, stop, root, size)
        blocks = [self._by_hash[key] for key in start.hashes]
        whole = len(blocks) * size
        left = token_bytes(tokens, whole, min(whole + size, stop))
        tail, run = self.longest_run(start.parent(len(blocks)), left)
        goes_on = tail is not None and len(tail.tokens) > run * TOKEN_BYTES
        level, entry, kept = self._latest_state(blocks, tokens, stop, root)
        position = level * size + kept
        known = whole + (run if run >= self._min_copied_run else 0)
        num_blocks = position // size
        return PrefixMatch(
            hashes=start.hashes[:num_blocks],
            blocks=[blocks[:num_blocks]],
            tails=[entry] if entry is not None and kept < size else [],
            num_cached=position,
            miss=self._stateful_miss(position, known, stop, was_evicted, goes_on),
            snapshot=None if entry is None else self.snapshots.use(entry.block, kept),
            prefix_without_state=whole if whole > position else 0,
        )

    def forget(self, block: int) -> None:
        self.snapshots.forget(block)
        super().forget(block)

    def check_integrity(self) -> None:
        super().check_integrity()
        lengths = {
            block: len(entry.tokens) // TOKEN_BYTES for block, entry in self._by_block.items()
        }
        self.snapshots.check_integrity(lengths, self.block_size)

    def _latest_state(
        self, blocks: Sequence[CachedBlock], tokens: Sequence[int], stop: int, root: bytes
    ) -> tuple[int, CachedBlock | None, int]:
        """The prompt's last snapshot: the number of full blocks before its block, that block, and
        the number of the block's tokens before the snapshot. Without a snapshot: 0, None, 0."""
        for level in range(len(blocks), -1, -1):
            parent = blocks[level - 1].hash if level else root
            entries = chain(blocks[level : level + 1], self._siblings(parent))
            bearers = [entry for entry in entries if entry.block in self.snapshots]
            if not bearers:
                continue
            start = level * self.block_size
            left = token_bytes(tokens, start, min(start + self.block_size, stop))
            runs = [common_tokens(entry.tokens, left) for entry in bearers]
            kept, best = max(
                (self.snapshots.longest(entry.block, run), -i)
                for i, (entry, run) in enumerate(zip(bearers, runs, strict=True))
            )
            if kept:
                return level, bearers[-best], kept
        return 0, None, 0

    def _stateful_miss(
        self, position: int, known: int, stop: int, was_evicted: bool, goes_on: bool
    ) -> MissReason | None:
        """Why the reuse of ``[0, stop)`` ended at `position`, with K/V known up to `known`."""
        if stop < self._min_copied_run and position == 0:
            return MissReason.TOO_SHORT
        if stop - position < self._min_copied_run:
            return None
        if known - position >= self._min_copied_run:
            return MissReason.NO_STATE
        return miss_reason(self.min_run, position, stop, 0, was_evicted, goes_on)

    def _add(self, entry: CachedBlock) -> None:
        for shorter in list(self._siblings(entry.parent)):
            if entry.tokens.startswith(shorter.tokens):
                self.snapshots.move(shorter.block, entry.block)
        super()._add(entry)
