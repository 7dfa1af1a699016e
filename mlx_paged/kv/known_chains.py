"""What the prefix cache knows, as chains of blocks: counts, never tokens. Knows no mlx."""

from collections.abc import Callable, Iterable
from heapq import nlargest
from math import inf
from typing import NamedTuple

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.cached_block import CachedBlock
from mlx_paged.kv.prefix_cache import TOKEN_BYTES, root_hash


class Chain(NamedTuple):
    """A text that a prompt can go on from, up to a block after which no known block goes on.

    Attributes:
        tokens: of the text.
        shared_tokens: the first of them, which other chains have, too.
        hits: how often its last block counts as used, as the order of eviction counts.
        worth: of its last block, as that order counts; of two, the one with less goes first; 0 of a
            pinned block and of one that was only written. In :data:`~mlx_paged.kv.worth.UNIT`.
        age: how many times a block became idle since its last one did; 0: a sequence holds it.
        in_use: whether a sequence holds its last block.
        is_pinned: whether its last block is pinned.
        pinned_s: seconds until the pin ends, 0 if it has; None: there is none, or it has no end.
        root: what tells its salt and adapter apart from others; empty: it has neither.
    """

    tokens: int
    shared_tokens: int
    hits: int
    worth: int
    age: int
    in_use: bool
    is_pinned: bool
    pinned_s: float | None
    root: bytes = b""


class _Place(NamedTuple):
    """Where a block is in its text: tokens up to its end, and those that other texts share."""

    stop: int
    shared: int


def known_blocks(allocator: BlockAllocator) -> list[CachedBlock]:
    """The blocks that are known in the layer group that keeps most of them. Call this on the thread
    that uses the allocator; what is returned may be read on another one."""
    known = [list(cache.by_block.values()) for cache in allocator.store.prefixes]
    return max(known, key=len)


def worths(allocator: BlockAllocator) -> Callable[[CachedBlock], int]:
    """What tells the worth of a known block, on any thread."""
    return allocator.store.idle.value


def chains(
    blocks: Iterable[CachedBlock],
    salt: bytes | None,
    most: int,
    now: float = 0.0,
    value: Callable[[CachedBlock], int] = lambda known: 0,
) -> tuple[int, list[Chain]]:
    """How many chains of a salt there are, of all if it is None, and `most` of them: those with
    most tokens. Blocks whose text does not begin with a known block are in none. Takes O(n) for
    n blocks. `now` is the time of the clock with which pins are made, `value` tells the worth of a
    block."""
    by_hash = {each.hash: each for each in blocks}
    followers: dict[bytes, int] = {}
    for each in by_hash.values():
        followers[each.parent] = followers.get(each.parent, 0) + 1
    newest = max((each.stamp for each in by_hash.values()), default=0)
    roots = {each.root for each in by_hash.values()} if salt is None else {root_hash(salt)}
    places: dict[bytes, _Place | None] = dict.fromkeys(roots, _Place(0, 0))
    found = []
    for each in by_hash.values():
        if each.hash in followers:
            continue
        place = _place(each, by_hash, followers, places)
        if place is not None:
            age = newest - each.stamp if each.stamp else 0
            until = each.pinned_until
            found.append(
                Chain(
                    place.stop,
                    place.shared,
                    max(0, each.uses),
                    value(each),
                    age,
                    not each.stamp,
                    until > 0,
                    max(0.0, until - now) if 0 < until < inf else None,
                    each.root,
                )
            )
    return len(found), nlargest(most, found, key=lambda chain: chain.tokens)


def _place(
    last: CachedBlock,
    by_hash: dict[bytes, CachedBlock],
    followers: dict[bytes, int],
    places: dict[bytes, _Place | None],
) -> _Place | None:
    """The place of a block, and of all before it, in `places`; None: its text has no known
    beginning of this salt."""
    path, key = list[CachedBlock](), last.hash
    while key not in places:
        block = by_hash.get(key)
        if block is None:
            places[key] = None
            break
        path.append(block)
        key = block.parent
    place = places[key]
    for block in reversed(path):
        if place is not None:
            stop = place.stop + len(block.tokens) // TOKEN_BYTES
            place = _Place(stop, stop if followers.get(block.hash, 0) > 1 else place.shared)
        places[block.hash] = place
    return place
