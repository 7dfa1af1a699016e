"""How much of a prompt the prefix caches of all layer groups hold. Knows no mlx."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.prefix_cache import (
    TOKEN_BYTES,
    CachedBlock,
    PrefixCache,
    chain_hash,
    token_bytes,
)
from mlx_paged.kv.snapshots import Snapshot


class MissReason(StrEnum):
    """Why the reuse of cached K/V ended where it did: the first of these that applies.

    A prompt reuses the full blocks that agree with it, then a run of leading tokens of one more
    block, but never its own last token. There is no reason (None) if the rest of the prompt is
    shorter than the smallest usable run.

    Attributes:
        DISABLED: the caller did not ask for reuse.
        TOO_SHORT: the prompt without its last token is shorter than the smallest usable run.
        NO_STATE: more K/V agrees, but the model has recurrent layers and no snapshot of their
            states is kept there.
        EVICTED: the prompt's next full block was cached and has been evicted.
        UNSEEN: nothing was reused: no cached text begins like this prompt.
        DIVERGED: the cached text that agrees longest continues differently.
        END: the cached text ends there.
    """

    DISABLED = "disabled"
    TOO_SHORT = "too_short"
    NO_STATE = "no_state"
    EVICTED = "evicted"
    UNSEEN = "unseen"
    DIVERGED = "diverged"
    END = "end"


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a prompt.

    Attributes:
        hashes: of its full blocks.
        blocks: for each layer group the last of these blocks, as many as a sequence keeps.
        tails: for each group the block after them whose first tokens agree with the prompt, if it
            is worth a copy; else empty.
        num_tokens: leading tokens of the prompt that are found.
        miss: why the reuse ended there; None if all that can be reused is.
        snapshot: the recurrent states after these tokens, if the model has any.
        prefix_without_state: length of a longer cached prefix that lacks its state; 0: none.
    """

    hashes: list[bytes]
    blocks: list[list[CachedBlock]]
    tails: list[CachedBlock]
    num_tokens: int
    miss: MissReason | None
    snapshot: Snapshot | None = None
    prefix_without_state: int = 0


@dataclass(frozen=True, slots=True)
class FullBlocks:
    """The full blocks at the start of a prompt.

    Attributes:
        root: the parent hash of the first one.
        hashes: of each block.
        contents: the tokens of each block, as :func:`token_bytes`.
    """

    root: bytes
    hashes: list[bytes]
    contents: list[bytes]

    def parent(self, index: int) -> bytes:
        return self.hashes[index - 1] if index else self.root

    def found(self, cache: PrefixCache, index: int) -> CachedBlock | None:
        """The cached block with the content of this one."""
        return cache.find(self.hashes[index], self.parent(index), self.contents[index])


def known_start(
    caches: Sequence[PrefixCache], tokens: Sequence[int], stop: int, root: bytes, block_size: int
) -> tuple[FullBlocks, bool]:
    """The full blocks of ``tokens[:stop]`` up to the first one that a cache lacks, and whether that
    one was evicted. Without caches: all full blocks."""
    known, parent = FullBlocks(root, [], []), root
    for start in range(0, stop - block_size + 1, block_size):
        content = token_bytes(tokens, start, start + block_size)
        key = chain_hash(parent, content)
        for cache in caches:
            if cache.find(key, parent, content) is None:
                return known, cache.was_evicted(key)
        known.hashes.append(key)
        known.contents.append(content)
        parent = key
    return known, False


def match_prefix(
    caches: Sequence[PrefixCache],
    groups: Sequence[LayerGroup],
    tokens: Sequence[int],
    stop: int,
    root: bytes,
) -> PrefixMatch:
    """The longest reusable prefix of ``tokens[:stop]`` after `root`.

    A layer group without a window needs all blocks of the prefix; a group with a window needs those
    that a sequence keeps.
    """
    size, pairs = caches[0].block_size, list(zip(caches, groups, strict=True))
    whole = [cache for cache, group in pairs if group.window is None]
    known, was_evicted = known_start(whole, tokens, stop, root, size)
    count = len(known.hashes)
    firsts = [group.kept_from(count * size) // size for group in groups]
    if len(whole) < len(caches):
        while (missing := _missing(known, firsts, count, caches)) is not None:
            cache, count = missing
            was_evicted = cache.was_evicted(known.hashes[count])
            firsts = [group.kept_from(count * size) // size for group in groups]
    blocks = [
        [block for i in range(first, count) if (block := known.found(cache, i)) is not None]
        for cache, first in zip(caches, firsts, strict=True)
    ]
    left = token_bytes(tokens, count * size, min((count + 1) * size, stop))
    runs = [cache.longest_run(known.parent(count), left) for cache in caches]
    longest, length = runs[0]
    goes_on = longest is not None and len(longest.tokens) > length * TOKEN_BYTES
    run = min(length for _, length in runs)
    tails = [block for block, _ in runs if block is not None and run >= caches[0].min_run]
    run = run if tails else 0
    miss = miss_reason(caches[0].min_run, count * size, stop, run, was_evicted, goes_on)
    return PrefixMatch(known.hashes[:count], blocks, tails, count * size + run, miss)


def _missing(
    known: FullBlocks, firsts: Sequence[int], count: int, caches: Sequence[PrefixCache]
) -> tuple[PrefixCache, int] | None:
    """A cache that lacks one of the first `count` blocks that its group needs, and that block; None
    if there is none."""
    for cache, first in zip(caches, firsts, strict=True):
        for index in range(count - 1, first - 1, -1):
            if known.found(cache, index) is None:
                return cache, index
    return None


def miss_reason(
    min_run: int, start: int, stop: int, run: int, was_evicted: bool, goes_on: bool
) -> MissReason | None:
    """Why the reuse of ``[0, stop)`` ended after full blocks up to `start` and a run.

    Args:
        was_evicted: whether the next full block was cached and has been evicted.
        goes_on: whether cached text that agrees up to there continues differently.
    """
    if stop < min_run:
        return MissReason.TOO_SHORT
    if stop - start < min_run or start + run == stop:
        return None
    if was_evicted:
        return MissReason.EVICTED
    if start + run == 0:
        return MissReason.UNSEEN
    return MissReason.DIVERGED if goes_on else MissReason.END
