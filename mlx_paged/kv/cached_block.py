"""A block whose content the prefix cache knows. Knows no mlx."""

from dataclasses import dataclass

FIRST = -1  # uses of content that is the first to go


@dataclass(slots=True)
class CachedBlock:
    """A block of known content: its tokens and the hash of the prefix they extend.

    Attributes:
        tokens: as :func:`token_bytes`; a text's last block may have fewer than `block_size`.
        uses: how often texts were found to go on with it, or after the block before; `FIRST`: it is
            the first to go.
        is_used: whether a later text was found to begin with it.
        followers: how many blocks have gone on after it so far.
        used_followers: how many of these are used.
        rank: in what order it is evicted among blocks that were used.
        stamp: number of the time since which it is idle; 0: it is held, or its content is new.
    """

    block: int
    hash: bytes
    parent: bytes
    tokens: bytes
    uses: int = 0
    is_used: bool = False
    followers: int = 0
    used_followers: int = 0
    rank: int = 0
    stamp: int = 0
