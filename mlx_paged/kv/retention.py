"""What callers say of the content that the pool keeps: pin it, drop it, forget it. Knows no mlx."""

from collections.abc import Callable, Sequence

from mlx_paged.kv.blocks import BlockStore
from mlx_paged.kv.cached_block import CachedBlock
from mlx_paged.kv.group_prefixes import GroupPrefixes
from mlx_paged.kv.pins import Pinned
from mlx_paged.kv.prefix_cache import TOKEN_BYTES, root_hash

NO_TOKEN = -1


class Retention:
    """Pins and forgets texts in the prefix caches of all layer groups."""

    def __init__(self, store: BlockStore, prefixes: GroupPrefixes) -> None:
        self._store, self._prefixes = store, prefixes

    def pin(self, tokens: Sequence[int], salt: bytes, until: float) -> Pinned:
        """Keep what is known of a text until then, from its beginning on: its blocks are evicted
        after all others."""
        found, num_known = self._found(tokens, salt)
        num_pinned = 0
        for stop, blocks in found:
            for known in blocks:
                if (reason := self._store.idle.pin(known, until)) is not None:
                    return Pinned(num_pinned, reason)
            num_pinned = stop
        # Fewer tokens than `min_run` at the end of a text are never known.
        is_whole = num_known > len(tokens) - self._store.prefixes[0].min_run
        return Pinned(num_pinned, None if is_whole else "not_cached")

    def mark(self, tokens: Sequence[int], salt: bytes, seconds: float, now: float) -> None:
        """Raise the worth of what is known of a text for some time, from its beginning on, and
        again when it is used meanwhile. This is no pin."""
        found, _ = self._found(tokens, salt)
        for known in (known for _, blocks in found for known in blocks):
            self._store.idle.mark(known, seconds, now)

    def drop(self, tokens: Sequence[int], salt: bytes) -> int:
        """Forget a text from its end on, as far as nothing else needs it: no sequence holds it, no
        known text goes on differently there, and no later text was found to begin with it. Returns
        the number of tokens."""
        return self._drop(tokens, salt, spares_used=True)

    def forget(self, tokens: Sequence[int], salt: bytes) -> int:
        """As :meth:`drop`, but what later texts were found to begin with is forgotten, too."""
        return self._drop(tokens, salt, spares_used=False)

    def forget_all(self, salt: bytes) -> int:
        """Forget all texts of a salt that no sequence holds; returns the number of blocks."""
        root, num_blocks = root_hash(salt), 0
        for prefixes in self._store.prefixes:
            for known in [*prefixes.by_block.values()]:
                if known.root == root and known.block in self._store.idle:
                    self._store.forget_idle(known.block)
                    num_blocks += known.width
        return num_blocks

    def expire(self, clock: Callable[[], float]) -> None:
        """End the pins and marks whose time is over. The clock is read only if there are any."""
        if self._store.idle.has_ends:
            self._store.idle.expire(clock())

    def _found(
        self, tokens: Sequence[int], salt: bytes
    ) -> tuple[list[tuple[int, list[CachedBlock]]], int]:
        """The known blocks of a text, in the order of their places: where each place ends, and the
        blocks of all groups there. And how many leading tokens are known."""
        match = self._prefixes.match([*tokens, NO_TOKEN], len(tokens) + 1, salt)
        size, count = self._store.prefixes[0].block_size, len(match.hashes)
        found = []
        for i in range(count):
            at = [of_group[i - count] for of_group in match.blocks if len(of_group) >= count - i]
            found.append(((i + 1) * size, at))
        if match.tails:
            found.append((match.num_cached, match.tails))
        return found, match.num_cached

    def _drop(self, tokens: Sequence[int], salt: bytes, spares_used: bool) -> int:
        found, num_known = self._found(tokens, salt)
        size = self._store.prefixes[0].block_size
        run = num_known % size * TOKEN_BYTES
        if run and any(len(known.tokens) != run for known in found[-1][1]):
            found.pop()  # the text ends within a block of another one
            num_known -= num_known % size
        num_left = num_known
        for stop, blocks in reversed(found):
            for known in blocks:
                is_needed = known.block not in self._store.idle or (spares_used and known.is_used)
                if is_needed or self._store.is_followed(known.block):
                    return num_known - num_left
            for known in blocks:
                self._store.forget_idle(known.block)
            num_left = (stop - 1) // size * size
        return num_known - num_left
