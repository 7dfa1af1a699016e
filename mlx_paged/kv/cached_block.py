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
        score: how often they were, as :mod:`mlx_paged.kv.frequency` counts; 0 without uses.
        worth: operations to compute it again, per byte: see :mod:`mlx_paged.kv.worth`.
        is_used: whether a later text was found to begin with it.
        followers: how many blocks have gone on after it so far.
        used_followers: how many of these are used.
        rank: in what order it is evicted among blocks that were used.
        stamp: number of the time since which it is idle; 0: it is held, or its content is new.
        is_last: whether it is idle and no known block goes on after it.
        width: how many blocks of the pool it takes.
        root: the parent hash of the text's first block, which differs from salt to salt.
        pinned_until: when its pin ends, in seconds of the scheduler's clock; 0: it has none.
        marked_s: for how many seconds its worth is raised, from its latest use on.
        marked_until: when that ends; 0: its worth is not raised.
    """

    block: int
    hash: bytes
    parent: bytes
    tokens: bytes
    uses: int = 0
    score: int = 0
    worth: int = 1
    is_used: bool = False
    followers: int = 0
    used_followers: int = 0
    rank: float = 0
    stamp: int = 0
    is_last: bool = False
    width: int = 1
    root: bytes = b""
    pinned_until: float = 0.0
    marked_s: float = 0.0
    marked_until: float = 0.0
