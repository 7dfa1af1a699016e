"""What an allocation of blocks asks for and gives. Knows no mlx."""

from dataclasses import dataclass

from mlx_paged.kv.prefix_cache import MissReason
from mlx_paged.kv.snapshots import Snapshot


class OutOfBlocksError(RuntimeError):
    """The pool cannot give the blocks that were asked for; nothing was changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {available} available")
        self.needed = needed
        self.available = available


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: the content of block `src` goes to block `dst` before anything is written."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Admission:
    """What a new sequence found in the prefix cache.

    Attributes:
        num_cached: leading tokens whose K/V is in its blocks once `copies` are performed.
        copies: to perform, in order, before anything is written.
        miss: why there are no more of them; None if all that can be reused are.
        snapshot: what the sequence's recurrent states begin with.
        branch: where full blocks known beyond that end; 0: there are none.
    """

    num_cached: int
    copies: list[BlockCopy]
    miss: MissReason | None
    snapshot: Snapshot | None = None
    branch: int = 0


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
