"""Which blocks hold which token prefixes, and why a prefix was not found. Knows no mlx."""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from itertools import islice
from typing import Self

from mlx_paged.kv.snapshots import Snapshot, Snapshots

ROOT = b""

TOKEN_BYTES = 8

MAX_SIBLINGS = 8
"""A look-up compares a prompt with at most so many blocks after the same prefix, the latest first.
Many prompts may continue one system prompt."""

EVICTED_PER_BLOCK = 4
"""Hashes of evicted blocks that are kept for each block of the pool."""


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
    """How many leading tokens of a block must agree with a prompt's rest before it is copied.

    To copy a block costs less than to compute a few tokens. But prompts that share a few tokens by
    chance, such as a template's first ones, would fill the pool with near-equal blocks.
    """
    return max(1, block_size // 4)


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two texts have in common."""
    length = min(len(a), len(b))
    differing = int.from_bytes(a[:length], "little") ^ int.from_bytes(b[:length], "little")
    if not differing:
        return length // TOKEN_BYTES
    lowest_bit = (differing & -differing).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block whose content is known: its tokens and the hash of the prefix they extend.

    Attributes:
        tokens: as :func:`token_bytes`; a text's last block may have fewer than `block_size`.
    """

    block: int
    hash: bytes
    parent: bytes
    tokens: bytes


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a prompt.

    Attributes:
        blocks: its full blocks.
        tail: the block after them whose first tokens agree with the prompt, if it is worth a copy.
        num_tokens: leading tokens of the prompt that `blocks` and `tail` hold.
        miss: why the reuse ended there; None if all that can be reused is.
        snapshot: the recurrent states after these tokens, if the model has any.
        prefix_without_state: length of a longer cached prefix that lacks its state; 0: none.
    """

    blocks: list[CachedBlock]
    tail: CachedBlock | None
    num_tokens: int
    miss: MissReason | None
    snapshot: Snapshot | None = None
    prefix_without_state: int = 0


class PrefixCache:
    """Blocks of known content by chained hash. Those that no sequence holds are idle.

    A hash collision cannot return wrong K/V: a found block's tokens and parent are compared too.

    Attributes:
        snapshots: of recurrent states; None for a model without recurrent layers.
    """

    snapshots: Snapshots | None = None

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.min_run = smallest_run(block_size)
        self._num_blocks = num_blocks
        self._max_evicted = EVICTED_PER_BLOCK * num_blocks
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._by_parent: dict[bytes, dict[int, None]] = {}  # blocks, latest last
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # hashes of full blocks

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def emptied(self) -> Self:
        """An empty cache of the same kind and size."""
        return type(self)(self._num_blocks, self.block_size)

    @property
    def num_idle(self) -> int:
        """Known blocks that no sequence holds."""
        return len(self._idle)

    def register(self, block: int, parent: bytes, tokens: bytes) -> bytes:
        """Add a full block and return its hash. Of blocks with equal content the first stays."""
        key = chain_hash(parent, tokens)
        if key not in self._by_hash and block not in self._by_block:
            self._add(CachedBlock(block, key, parent, tokens))
            self._evicted.pop(key, None)
        return key

    def register_tail(self, block: int, parent: bytes, tokens: bytes) -> None:
        """Add a text's last block, unless it is too short or a known block begins with it."""
        if len(tokens) < self.min_run * TOKEN_BYTES or block in self._by_block:
            return
        key = chain_hash(parent, tokens)
        is_covered = any(entry.tokens.startswith(tokens) for entry in self._siblings(parent))
        if key not in self._by_hash and not is_covered:
            self._add(CachedBlock(block, key, parent, tokens))

    def match(self, tokens: Sequence[int], stop: int, root: bytes = ROOT) -> PrefixMatch:
        """The longest reusable prefix of ``tokens[:stop]`` after `root`."""
        blocks, was_evicted = self._known_blocks(tokens, stop, root)
        start = len(blocks) * self.block_size
        left = token_bytes(tokens, start, min(start + self.block_size, stop))
        tail, run = self._longest_run(blocks[-1].hash if blocks else root, left)
        goes_on = tail is not None and len(tail.tokens) > run * TOKEN_BYTES
        if run < self.min_run:
            tail, run = None, 0
        miss = self._miss(start, stop, run, was_evicted, goes_on)
        return PrefixMatch(blocks, tail, start + run, miss)

    def set_idle(self, blocks: Sequence[int]) -> list[int]:
        """No sequence holds these blocks any more; returns those of unknown content."""
        known, idle = self._by_block, self._idle
        unknown = []
        for block in blocks:
            if block in known:
                idle[block] = None
            else:
                unknown.append(block)
        return unknown

    def set_busy(self, block: int) -> None:
        """A sequence or a copy needs the block again."""
        self._idle.pop(block, None)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def evict(self, block: int | None = None) -> int:
        """Forget an idle block, by default the one unused longest, and return it."""
        if block is None:
            block, _ = self._idle.popitem(last=False)
        else:
            del self._idle[block]
        entry = self._by_block[block]
        self.forget(block)
        if len(entry.tokens) == self.block_size * TOKEN_BYTES:
            self._evicted[entry.hash] = None
            if len(self._evicted) > self._max_evicted:
                self._evicted.popitem(last=False)
        return block

    def forget(self, block: int) -> None:
        """Forget the block: its content is about to change."""
        entry = self._by_block.pop(block, None)
        if entry is None:
            return
        del self._by_hash[entry.hash]
        siblings = self._by_parent[entry.parent]
        del siblings[block]
        if not siblings:
            del self._by_parent[entry.parent]

    def check_integrity(self) -> None:
        """Assert that all indices hold the same blocks."""
        assert len(self._by_hash) == len(self._by_block)
        assert sum(map(len, self._by_parent.values())) == len(self._by_block)
        assert all(self._by_parent.values()), "a prefix without blocks is kept"
        for block, entry in self._by_block.items():
            assert entry.block == block and self._by_hash[entry.hash] is entry
            assert block in self._by_parent[entry.parent]
            assert entry.hash == chain_hash(entry.parent, entry.tokens)
            num_tokens, odd_bytes = divmod(len(entry.tokens), TOKEN_BYTES)
            assert self.min_run <= num_tokens <= self.block_size and odd_bytes == 0
        assert all(block in self._by_block for block in self._idle)
        assert len(self._evicted) <= self._max_evicted
        assert self._evicted.keys().isdisjoint(self._by_hash), "a known block counts as evicted"

    def _known_blocks(
        self, tokens: Sequence[int], stop: int, root: bytes
    ) -> tuple[list[CachedBlock], bool]:
        """The known full blocks at the start of ``tokens[:stop]``; whether the next was evicted."""
        blocks: list[CachedBlock] = []
        parent = root
        for start in range(0, stop - self.block_size + 1, self.block_size):
            content = token_bytes(tokens, start, start + self.block_size)
            key = chain_hash(parent, content)
            entry = self._by_hash.get(key)
            if entry is None or entry.tokens != content or entry.parent != parent:
                return blocks, key in self._evicted
            blocks.append(entry)
            parent = key
        return blocks, False

    def _siblings(self, parent: bytes) -> Iterator[CachedBlock]:
        """The known blocks right after a prefix, latest first, at most MAX_SIBLINGS."""
        blocks = islice(reversed(self._by_parent.get(parent, {})), MAX_SIBLINGS)
        return map(self._by_block.__getitem__, blocks)

    def _longest_run(self, parent: bytes, tokens: bytes) -> tuple[CachedBlock | None, int]:
        """The known block after `parent` with most leading tokens in common, and how many."""
        best: CachedBlock | None = None
        longest = -1
        for entry in self._siblings(parent):
            run = common_tokens(entry.tokens, tokens)
            if run > longest:
                best, longest = entry, run
        return best, max(longest, 0)

    def _miss(
        self, start: int, stop: int, run: int, was_evicted: bool, goes_on: bool
    ) -> MissReason | None:
        """Why the reuse of ``[0, stop)`` ended after full blocks up to `start` and a run."""
        if stop < self.min_run:
            return MissReason.TOO_SHORT
        if stop - start < self.min_run or start + run == stop:
            return None
        if was_evicted:
            return MissReason.EVICTED
        if start + run == 0:
            return MissReason.UNSEEN
        return MissReason.DIVERGED if goes_on else MissReason.END

    def _add(self, entry: CachedBlock) -> None:
        """Index a block. Idle blocks that it begins with are no longer useful: evict them first."""
        for shorter in self._siblings(entry.parent):
            if entry.tokens.startswith(shorter.tokens) and shorter.block in self._idle:
                self._idle.move_to_end(shorter.block, last=False)
        self._by_hash[entry.hash] = entry
        self._by_block[entry.block] = entry
        self._by_parent.setdefault(entry.parent, {})[entry.block] = None
