"""The prefix cache of a model with recurrent layers. Knows no mlx."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

from mlx_paged.kv.prefix_cache import (
    TOKEN_BYTES,
    CachedBlock,
    PrefixCache,
    chain_hash,
    common_tokens,
    smallest_run,
    token_bytes,
)
from mlx_paged.kv.prefix_match import MissReason, miss_reason
from mlx_paged.kv.snapshots import Snapshot, Snapshots


class StatefulPrefixCache(PrefixCache):
    """Blocks of known content, reusable only up to a snapshot of the recurrent states, within a
    block if necessary: a state exists at one position only. A run of any length is then worth a
    copy. The blocks of a model without K/V hold nothing and only count its tokens."""

    def __init__(
        self, num_blocks: int, block_size: int, idle: OrderedDict[int, None], max_snapshots: int
    ) -> None:
        super().__init__(num_blocks, block_size, idle)
        self.min_run = 1
        self.snapshots: Snapshots = Snapshots(max_snapshots)

    def attach(self, parent: bytes, tokens: bytes, snapshot: Snapshot) -> bool:
        """Keep a snapshot of the states after `tokens`, a block or its first tokens after `parent`.
        Returns False if their K/V is not known or they have a snapshot."""
        cached = self._by_hash.get(chain_hash(parent, tokens))
        if cached is None:
            siblings = self._siblings(parent)
            cached = next((e for e in siblings if e.tokens.startswith(tokens)), None)
        if cached is None:
            return False
        return self.snapshots.add(cached.block, len(tokens) // TOKEN_BYTES, snapshot)

    def forget(self, block: int) -> None:
        self.snapshots.forget(block)
        super().forget(block)

    def check_integrity(self) -> None:
        super().check_integrity()
        lengths = {
            block: len(cached.tokens) // TOKEN_BYTES for block, cached in self.by_block.items()
        }
        self.snapshots.check_integrity(lengths, self.block_size)

    def latest_state(
        self, hashes: Sequence[bytes], tokens: Sequence[int], stop: int, root: bytes
    ) -> tuple[int, list[CachedBlock], Snapshot | None]:
        """The last snapshot within ``tokens[:stop]``, whose known full blocks have these hashes:
        its position, its block unless it is at the block's end, and the snapshot."""
        size = self.block_size
        for level in range(len(hashes), -1, -1):
            known = [self._by_hash[key] for key in hashes[level : level + 1]]
            candidates = chain(known, self._siblings(hashes[level - 1] if level else root))
            bearers = [cached for cached in candidates if cached.block in self.snapshots]
            if not bearers:
                continue
            left = token_bytes(tokens, level * size, min((level + 1) * size, stop))
            runs = [common_tokens(cached.tokens, left) for cached in bearers]
            kept, best = max(
                (self.snapshots.longest(cached.block, run), -i)
                for i, (cached, run) in enumerate(zip(bearers, runs, strict=True))
            )
            if kept:
                cached = bearers[-best]
                snapshot = self.snapshots.use(cached.block, kept)
                return level * size + kept, [cached] if kept < size else [], snapshot
        return 0, [], None

    def miss_reason(
        self, position: int, known: int, stop: int, was_evicted: bool, goes_on: bool
    ) -> MissReason | None:
        """Why the reuse of ``[0, stop)`` ended at `position`, with K/V known up to `known`."""
        min_copied_run = smallest_run(self.block_size)
        if stop < min_copied_run and position == 0:
            return MissReason.TOO_SHORT
        if stop - position < min_copied_run:
            return None
        if known - position >= min_copied_run:
            return MissReason.NO_STATE
        return miss_reason(self.min_run, position, stop, 0, was_evicted, goes_on)

    def _add(self, cached: CachedBlock) -> None:
        for shorter in list(self._siblings(cached.parent)):
            if cached.tokens.startswith(shorter.tokens):
                self.snapshots.move(shorter.block, cached.block)
        super()._add(cached)
