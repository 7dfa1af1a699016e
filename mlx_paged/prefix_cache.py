"""Which full blocks hold which token prefixes. Knows no mlx."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

ROOT = b""


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a block's tokens and of everything before them.

    A block is reusable only after the very same prefix, so each hash takes in its parent's
    (chained prefix hashes; Kwon et al. 2023, arXiv:2309.06180, section 4.4).
    """
    return blake2b(tokens, digest_size=16, key=parent).digest()


def block_bytes(tokens: Sequence[int], block: int, block_size: int) -> bytes:
    """The tokens of one full block as bytes, 8 a token."""
    return array("q", tokens[block * block_size : (block + 1) * block_size]).tobytes()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block whose content is known: its tokens and the hash of the prefix they extend."""

    block: int
    hash: bytes
    parent: bytes
    tokens: bytes


class PrefixCache:
    """Full blocks by chained hash, and those of them that nobody references, least recent first.

    Never wrong: a hash hit counts only if the block's own tokens and its parent agree too.
    """

    def __init__(self) -> None:
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    @property
    def num_idle(self) -> int:
        """Cached blocks that no sequence references: free for the taking, oldest first."""
        return len(self._idle)

    def register(self, block: int, parent: bytes, tokens: bytes) -> bytes:
        """Remember a full block's content; the first block of equal content stays the known one."""
        key = chain_hash(parent, tokens)
        if key not in self._by_hash and block not in self._by_block:
            entry = CachedBlock(block, key, parent, tokens)
            self._by_hash[key] = entry
            self._by_block[block] = entry
        return key

    def match(
        self, tokens: Sequence[int], block_size: int, salt: bytes = ROOT
    ) -> list[CachedBlock]:
        """The longest known chain of full blocks at the start of `tokens`."""
        chain: list[CachedBlock] = []
        parent = salt
        for block in range(len(tokens) // block_size):
            content = block_bytes(tokens, block, block_size)
            entry = self._by_hash.get(chain_hash(parent, content))
            if entry is None or entry.tokens != content or entry.parent != parent:
                break
            chain.append(entry)
            parent = entry.hash
        return chain

    def set_idle(self, block: int) -> None:
        """The last reference is gone: keep the content until the block is needed."""
        self._idle[block] = None

    def set_busy(self, block: int) -> None:
        """A sequence references the block again."""
        self._idle.pop(block, None)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def evict(self) -> int:
        """Forget the idle block that has been unused longest and hand it over."""
        block, _ = self._idle.popitem(last=False)
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """The block's content is about to change."""
        entry = self._by_block.pop(block, None)
        if entry is not None:
            del self._by_hash[entry.hash]

    def check_integrity(self) -> None:
        assert len(self._by_hash) == len(self._by_block)
        for block, entry in self._by_block.items():
            assert entry.block == block and self._by_hash[entry.hash] is entry
            assert entry.hash == chain_hash(entry.parent, entry.tokens)
        assert all(block in self._by_block for block in self._idle)
