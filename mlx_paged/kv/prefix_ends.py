"""Where a known prefix of a prompt may end. Knows no mlx."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv.cached_block import CachedBlock
from mlx_paged.kv.prefix_cache import (
    TOKEN_BYTES,
    PrefixCache,
    smallest_run,
    token_bytes,
)
from mlx_paged.kv.prefix_match import MissReason, NeededBlock, miss_reason


@dataclass(slots=True)
class KnownBlocks:
    """The full blocks at the beginning of a prompt whose K/V is known.

    Attributes:
        tokens: the prompt; only ``tokens[:stop]`` may be reused.
        root: the parent hash of the prompt's first block.
        hashes: of the blocks.
        was_evicted: whether the next full block was known and has been evicted.
        is_complete: whether every layer group has what a sequence keeps of the first n blocks.
    """

    tokens: Sequence[int]
    stop: int
    root: bytes
    hashes: list[bytes]
    was_evicted: bool
    is_complete: Callable[[int], bool]

    def parent(self, index: int) -> bytes:
        """The hash of what is before a block."""
        return self.hashes[index - 1] if index else self.root


class LongestRun(NamedTuple):
    """The tokens after the known full blocks that agree with a block of each layer group.

    Attributes:
        start: where the known full blocks end.
        length: of the run; 0 if too few tokens agree for a copy to be worth it.
        blocks: of each group the block that agrees; none if the length is 0.
        goes_on: whether a block that agrees has more tokens.
        min_length: how many tokens are worth a copy.
    """

    start: int
    length: int
    blocks: list[CachedBlock]
    goes_on: bool
    min_length: int

    @classmethod
    def after(cls, known: KnownBlocks, caches: Sequence[PrefixCache]) -> "LongestRun":
        count, size = len(known.hashes), caches[0].block_size
        start, min_length = count * size, smallest_run(size)
        left = token_bytes(known.tokens, start, min(start + size, known.stop))
        runs = [cache.longest_run(known.parent(count), left) for cache in caches]
        longest, length = runs[0]
        goes_on = longest is not None and len(longest.tokens) > length * TOKEN_BYTES
        length = min(length for _, length in runs)
        if length < min_length:
            return cls(start, 0, [], goes_on, min_length)
        blocks = [block for block, _ in runs if block is not None]
        return cls(start, length, blocks, goes_on, min_length)


class PrefixEnd(NamedTuple):
    """Where a known prefix ends, and what a sequence that goes on there gets beside full blocks."""

    position: int
    tails: list[CachedBlock]  # of each group the block that the end is in; none at a block's end
    miss: MissReason | None
    checkpoint: Any = None  # what is kept there beside blocks


class Checkpoint(Protocol):
    """What layers keep of a text at one position, so that later texts can go on there."""

    position: int


class PrefixEnds(Protocol):
    """What the kinds of a model's layers say of the ends of prefixes."""

    is_within_blocks: bool  # whether a prefix may end at any token of a block

    def latest(self, known: KnownBlocks) -> PrefixEnd:
        """The last end of a prefix that can be reused."""

    def keep(self, parent: bytes, tokens: bytes, checkpoint: Any) -> bool:
        """Let prefixes end after `tokens`, a known block or its first tokens after `parent`, where
        `checkpoint` was taken. Returns whether the checkpoint is kept."""

    def shorten(self, hashes: list[bytes], known: KnownBlocks, elsewhere: Container[bytes]) -> None:
        """Remove the last of some blocks until a prefix can end after them, if what lies elsewhere
        under its key comes into the pool."""

    def needed_after(self, index: int, block: CachedBlock) -> list[NeededBlock]:
        """What a prefix needs that ends after a full block, beside blocks."""

    def leaving(self, block: CachedBlock) -> BlockTransfer | None:
        """What is kept after a full block that leaves the pool, beside its K/V."""

    def adopt(self, needed: NeededBlock, payload: Any) -> BlockTransfer | None:
        """Let prefixes end at what :meth:`needed_after` named, whose content `payload` has come
        from elsewhere. Returns the way of the content into the runner; None: it is not kept."""

    def check_integrity(self) -> None:
        """Assert that all books agree."""


class AnyEnd:
    """Where a prefix ends in layers that keep only K/V: after any token.

    Args:
        caches: of each layer group.
    """

    is_within_blocks = True

    def __init__(self, caches: Sequence[PrefixCache]) -> None:
        self._caches = caches

    def latest(self, known: KnownBlocks) -> PrefixEnd:
        found = LongestRun.after(known, self._caches)
        position = found.start + found.length
        miss = miss_reason(
            found.min_length,
            found.start,
            known.stop,
            found.length,
            known.was_evicted,
            found.goes_on,
        )
        return PrefixEnd(position, found.blocks, miss)

    def keep(self, parent: bytes, tokens: bytes, checkpoint: Any) -> bool:
        return False

    def shorten(self, hashes: list[bytes], known: KnownBlocks, elsewhere: Container[bytes]) -> None:
        pass

    def needed_after(self, index: int, block: CachedBlock) -> list[NeededBlock]:
        return []

    def leaving(self, block: CachedBlock) -> BlockTransfer | None:
        return None

    def adopt(self, needed: NeededBlock, payload: Any) -> BlockTransfer | None:
        return None

    def check_integrity(self) -> None:
        pass
