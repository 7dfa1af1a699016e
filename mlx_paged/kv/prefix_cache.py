"""Which blocks hold which token prefixes. Knows no mlx."""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Protocol

from mlx_paged.kv.cached_block import CachedBlock
from mlx_paged.kv.eviction import EvictionOrder

ROOT = b""

TOKEN_BYTES = 8

ABSENT = -1  # stands for a block that the pool lacks

MAX_SIBLINGS = 8
"""A look-up compares a prompt with at most so many blocks after the same prefix, the latest first.
Many prompts may continue one system prompt."""

EVICTED_PER_BLOCK = 4  # hashes of evicted blocks that are kept for each block of the pool


@lru_cache(1 << 13)  # a prompt is looked up several times until it runs
def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a block's tokens and of all tokens before them (chained prefix hashes; Kwon et al.
    2023, arXiv:2309.06180, section 4.4)."""
    return blake2b(tokens, digest_size=16, key=parent).digest()


def root_hash(salt: bytes) -> bytes:
    """The parent hash of a text's first block. Texts with different salts share no block."""
    return blake2b(salt, digest_size=16, person=b"salt").digest() if salt else ROOT


def token_bytes(tokens: Sequence[int], start: int, stop: int) -> bytes:
    """``tokens[start:stop]`` as bytes, 8 a token."""
    return array("q", tokens[start:stop]).tobytes()


def smallest_run(block_size: int) -> int:
    """How many leading tokens of a block must agree with a prompt's rest before it is copied. To
    copy costs less than to compute a few tokens, but prompts that share a few by chance, such as a
    template's first ones, would fill the pool with near-equal blocks."""
    return max(1, block_size // 4)


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two texts have in common."""
    length = min(len(a), len(b))
    differing = int.from_bytes(a[:length], "little") ^ int.from_bytes(b[:length], "little")
    if not differing:
        return length // TOKEN_BYTES
    lowest_bit = (differing & -differing).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)


class Dependents(Protocol):
    """What others keep for known blocks."""

    def forget(self, block: int) -> None:
        """The block's content is about to change."""

    def move(self, source: int, target: int) -> None:
        """The known block `target` begins with the tokens of the known block `source`."""

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """All blocks have other numbers now: block i has ``numbers[i]``."""


class NoDependents:
    """Nothing is kept for known blocks."""

    def forget(self, block: int) -> None:
        pass

    def move(self, source: int, target: int) -> None:
        pass

    def renumber(self, numbers: Mapping[int, int]) -> None:
        pass


class PrefixCache:
    """Blocks of known content of one layer group, by chained hash. A hash collision cannot return
    wrong K/V: a found block's tokens and parent are compared too.

    Args:
        order: in which the pool's blocks that no sequence holds are evicted.
        is_chain: whether a block is of no use without all blocks before it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        order: EvictionOrder,
        is_chain: bool = True,
        width: int = 1,  # blocks of the pool that one of its blocks takes
    ) -> None:
        self.block_size = block_size
        self.min_run = smallest_run(block_size)
        self._max_evicted = EVICTED_PER_BLOCK * num_blocks
        self._by_hash: dict[bytes, CachedBlock] = {}
        self.by_block: dict[int, CachedBlock] = {}  # what is known, by block
        self._by_parent: dict[bytes, dict[int, None]] = {}  # blocks, latest last
        self._order, self._is_chain, self._width = order, is_chain, width
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # hashes of full blocks
        self.dependents: Dependents = NoDependents()

    def __contains__(self, block: int) -> bool:
        return block in self.by_block

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_block)

    def clear(self) -> None:
        """Forget all blocks, and that any were known."""
        for block in list(self.by_block):
            self.forget(block)
        self._evicted.clear()

    def register(
        self,
        block: int,
        parent: bytes,
        tokens: bytes,
        key: bytes | None = None,
        root: bytes = ROOT,
        uses: int = 0,
        worth: int = 1,
    ) -> None:
        """Add a block, or a text's last one, which is not full, unless it is too short or a known
        block begins with it. Of blocks with equal content the first stays. `key` is the
        hash, `root` the parent hash of the text's first block, `uses` is `FIRST` if the block is
        the first to go, and `worth` is what the block is worth."""
        key = chain_hash(parent, tokens) if key is None else key
        if key in self._by_hash or block in self.by_block:
            return
        if len(tokens) < self.block_size * TOKEN_BYTES:
            is_known = any(cached.tokens.startswith(tokens) for cached in self._siblings(parent))
            if len(tokens) < self.min_run * TOKEN_BYTES or is_known:
                return
        known = CachedBlock(
            block,
            key,
            parent,
            tokens,
            uses,
            worth=worth,
            width=self._width,
            root=root,
        )
        self._add(known)
        self._evicted.pop(key, None)

    def find(self, key: bytes, parent: bytes, tokens: bytes) -> CachedBlock | None:
        """The block with this hash, if its content is really this one."""
        cached = self._by_hash.get(key)
        if cached is None or cached.tokens != tokens or cached.parent != parent:
            return None
        return cached

    def was_evicted(self, key: bytes) -> bool:
        """Whether a full block with this hash was known and has been evicted."""
        return key in self._evicted

    def evict(self, block: int) -> None:
        """Forget a block, and remember that it was known."""
        cached = self.by_block[block]
        self.forget(block)
        if len(cached.tokens) == self.block_size * TOKEN_BYTES:
            self._order.evicted(cached)
            self._evicted[cached.hash] = None
            if len(self._evicted) > self._max_evicted:
                self._evicted.popitem(last=False)

    def forget(self, block: int) -> None:
        """Forget the block: its content is about to change."""
        cached = self.by_block.pop(block, None)
        if cached is None:
            return
        self.dependents.forget(block)
        self._order.forgotten(cached)
        del self._by_hash[cached.hash]
        siblings = self._by_parent[cached.parent]
        del siblings[block]
        if not siblings:
            del self._by_parent[cached.parent]
            if self._is_chain and (before := self._by_hash.get(cached.parent)) is not None:
                self._order.last_of_its_text(before)

    def is_followed(self, cached: CachedBlock) -> bool:
        """Whether the block has to stay as long as a known block that goes on after it."""
        return self._is_chain and cached.hash in self._by_parent

    def used(self, cached: CachedBlock) -> None:
        """A text was found to begin with the block."""
        before = None if cached.is_used else self._by_hash.get(cached.parent)
        self._order.used(cached, before)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Block i is block ``numbers[i]`` from here on."""
        for cached in self.by_block.values():
            cached.block = numbers[cached.block]
        self.by_block = {cached.block: cached for cached in self.by_block.values()}
        self._by_parent = {
            parent: {numbers[block]: None for block in blocks}
            for parent, blocks in self._by_parent.items()
        }
        self.dependents.renumber(numbers)

    def check_integrity(self) -> None:
        """Assert that all indices hold the same blocks."""
        assert len(self._by_hash) == len(self.by_block)
        assert sum(map(len, self._by_parent.values())) == len(self.by_block)
        assert all(self._by_parent.values()), "a prefix without blocks is kept"
        for block, cached in self.by_block.items():
            assert cached.block == block and self._by_hash[cached.hash] is cached
            assert block in self._by_parent[cached.parent]
            assert cached.hash == chain_hash(cached.parent, cached.tokens)
            num_tokens, odd_bytes = divmod(len(cached.tokens), TOKEN_BYTES)
            assert self.min_run <= num_tokens <= self.block_size and odd_bytes == 0
        assert len(self._evicted) <= self._max_evicted
        assert self._evicted.keys().isdisjoint(self._by_hash), "a known block counts as evicted"

    def _siblings(self, parent: bytes) -> Iterator[CachedBlock]:
        """The known blocks right after a prefix, latest first, at most MAX_SIBLINGS."""
        blocks = islice(reversed(self._by_parent.get(parent, {})), MAX_SIBLINGS)
        return map(self.by_block.__getitem__, blocks)

    def after(self, parent: bytes, key: bytes | None) -> Iterator[CachedBlock]:
        """The known blocks right after a prefix: the one with hash `key`, then the latest ones."""
        if key is not None and key in self._by_hash:
            yield self._by_hash[key]
        yield from self._siblings(parent)

    def beginning_with(self, parent: bytes, tokens: bytes) -> CachedBlock | None:
        """A known block right after a prefix that begins with these tokens."""
        known = self._by_hash.get(chain_hash(parent, tokens))
        if known is not None:
            return known
        siblings = self._siblings(parent)
        return next((each for each in siblings if each.tokens.startswith(tokens)), None)

    def longest_run(self, parent: bytes, tokens: bytes) -> tuple[CachedBlock | None, int]:
        """The known block after `parent` with most leading tokens in common, and how many."""
        best: CachedBlock | None = None
        longest = -1
        for cached in self._siblings(parent):
            run = common_tokens(cached.tokens, tokens)
            if run > longest:
                best, longest = cached, run
        return best, max(longest, 0)

    def _add(self, cached: CachedBlock) -> None:
        """Index a block. Idle blocks that it begins with are no longer useful: evict them first."""
        for shorter in self._siblings(cached.parent) if cached.parent in self._by_parent else ():
            if cached.tokens.startswith(shorter.tokens):
                self.dependents.move(shorter.block, cached.block)
                self._order.give_up(shorter)
        self._order.registered(cached, self._by_hash.get(cached.parent))
        self._by_hash[cached.hash] = cached
        self.by_block[cached.block] = cached
        self._by_parent.setdefault(cached.parent, {})[cached.block] = None
