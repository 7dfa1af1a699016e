"""Prefixes of a model with recurrent layers end at snapshots. Knows no mlx."""

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv.cached_block import CachedBlock
from mlx_paged.kv.prefix_cache import (
    TOKEN_BYTES,
    PrefixCache,
    common_tokens,
    token_bytes,
)
from mlx_paged.kv.prefix_ends import KnownBlocks, LongestRun, PrefixEnd
from mlx_paged.kv.prefix_match import MissReason, NeededBlock, block_key, miss_reason
from mlx_paged.kv.snapshots import Snapshot, Snapshots
from mlx_paged.kv.state_kind import State


class StateEnds:
    """Where a prefix ends in recurrent layers, which keep a state at one position only: at a
    snapshot, within a block if necessary. The snapshots belong to blocks of the first layer
    group. The blocks of a model without K/V hold nothing and only count its tokens.

    Args:
        caches: of each layer group.
        new_state: a state at a position, held once.
        release: called with the id of a state that is not kept.
        rest: called with the id of a state that is kept and that no sequence has held.
    """

    is_within_blocks = False

    def __init__(
        self,
        caches: Sequence[PrefixCache],
        snapshots: Snapshots,
        new_state: Callable[[int], State],
        release: Callable[[int], None],
        rest: Callable[[int], None] = lambda state_id: None,
    ) -> None:
        self._first, *self._others = caches
        self._block_size = self._first.block_size
        self._snapshots = snapshots
        self._new_state, self._release, self._rest = new_state, release, rest
        self._first.dependents = snapshots
        for cache in caches:
            cache.min_run = 1  # a state is worth a copy of any length

    def latest(self, known: KnownBlocks) -> PrefixEnd:
        for position, block in self._ends(known):
            whole, run = divmod(position, self._block_size)
            if not known.is_complete(whole):
                continue
            left = token_bytes(known.tokens, position - run, position)
            runs = [other.longest_run(known.parent(whole), left) for other in self._others if run]
            if all(length == run for _, length in runs):
                tails = [block, *(other for other, _ in runs if other is not None)]
                snapshot = self._snapshots.get(block.block, run or self._block_size)
                miss = self._miss_reason(position, known)
                return PrefixEnd(position, tails if run else [], miss, snapshot)
        return PrefixEnd(0, [], self._miss_reason(0, known))

    def keep(self, parent: bytes, tokens: bytes, checkpoint: Snapshot) -> bool:
        block = self._first.beginning_with(parent, tokens)
        if block is None:
            return False
        return self._snapshots.add(block.block, len(tokens) // TOKEN_BYTES, checkpoint)

    def shorten(self, hashes: list[bytes], known: KnownBlocks, elsewhere: Container[bytes]) -> None:
        while hashes and (
            state_key(hashes[-1]) not in elsewhere or not known.is_complete(len(hashes))
        ):
            hashes.pop()

    def needed_after(self, index: int, block: CachedBlock) -> list[NeededBlock]:
        return [NeededBlock(index, 0, block, state_key(block.hash), is_state=True)]

    def leaving(self, block: CachedBlock) -> BlockTransfer | None:
        if self._block_size not in self._snapshots.runs(block.block, self._block_size):
            return None
        snapshot = self._snapshots.get(block.block, self._block_size)
        worth = snapshot.saved if snapshot.uses else 0
        return BlockTransfer(state_key(block.hash), 0, (), state=snapshot.state, worth=worth)

    def adopt(self, needed: NeededBlock, payload: Any) -> BlockTransfer | None:
        state = self._new_state((needed.index + 1) * self._block_size)
        known = needed.known
        if self.keep(known.parent, known.tokens, Snapshot(state.position, state=state.id)):
            self._rest(state.id)
            return BlockTransfer(needed.key, 0, (), payload, state.id)
        self._release(state.id)
        return None

    def check_integrity(self) -> None:
        lengths = {
            block: len(cached.tokens) // TOKEN_BYTES
            for block, cached in self._first.by_block.items()
        }
        self._snapshots.check_integrity(lengths, self._block_size)

    def _ends(self, known: KnownBlocks) -> Iterator[tuple[int, CachedBlock]]:
        """The position of each snapshot within the prompt, and the block that the snapshot is in,
        the last one first."""
        size = self._block_size
        for level in range(len(known.hashes), -1, -1):
            key = known.hashes[level] if level < len(known.hashes) else None
            candidates = self._first.after(known.parent(level), key)
            bearers = [cached for cached in candidates if cached.block in self._snapshots]
            if not bearers:
                continue
            left = token_bytes(known.tokens, level * size, min((level + 1) * size, known.stop))
            runs = [
                (run, -index)
                for index, cached in enumerate(bearers)
                for run in self._snapshots.runs(cached.block, common_tokens(cached.tokens, left))
            ]
            for run, index in sorted(runs, reverse=True):
                yield level * size + run, bearers[-index]

    def _miss_reason(self, position: int, known: KnownBlocks) -> MissReason | None:
        """Why the reuse of a prompt ends at `position`."""
        found, stop = LongestRun.after(known, [self._first, *self._others]), known.stop
        if stop < found.min_length and position == 0:
            return MissReason.TOO_SHORT
        if stop - position < found.min_length:
            return None
        if found.start + found.length - position >= found.min_length:
            return MissReason.NO_STATE
        min_run = self._first.min_run
        return miss_reason(min_run, position, stop, 0, known.was_evicted, found.goes_on)


def state_key(hash: bytes) -> bytes:
    """The name of the recurrent states after a block outside the pool, 24 bytes. No layer group has
    the number -1."""
    return block_key(hash, -1)
