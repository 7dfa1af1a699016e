"""The prefix cache of a model with recurrent layers. Knows no mlx."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
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
    block if necessary: a state exists at one position only. The blocks of a model without K/V hold
    nothing and only count its tokens."""

    def __init__(
        self, num_blocks: int, block_size: int, idle: OrderedDict[int, None], snapshots: Snapshots
    ) -> None:
        super().__init__(num_blocks, block_size, idle)
        self.snapshots: Snapshots = snapshots

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

    def states(
        self, hashes: Sequence[bytes], tokens: Sequence[int], stop: int, root: bytes
    ) -> Iterator[tuple[int, CachedBlock]]:
        """Where snapshots are within ``tokens[:stop]``, whose first full blocks have these hashes:
        each position and the block that the snapshot is in, the last one first."""
        size = self.block_size
        for level in range(len(hashes), -1, -1):
            known = filter(None, map(self._by_hash.get, hashes[level : level + 1]))
            candidates = chain(known, self._siblings(hashes[level - 1] if level else root))
            bearers = [cached for cached in candidates if cached.block in self.snapshots]
            if not bearers:
                continue
            left = token_bytes(tokens, level * size, min((level + 1) * size, stop))
            runs = [
                (run, -index)
                for index, cached in enumerate(bearers)
                for run in self.snapshots.runs(cached.block, common_tokens(cached.tokens, left))
            ]
            for run, index in sorted(runs, reverse=True):
                yield level * size + run, bearers[-index]

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
