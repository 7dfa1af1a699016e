"""What a prompt finds in a prefix cache, and why it finds no more. Knows no mlx."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlx_paged.kv.blocks import BlockCopy
from mlx_paged.kv.cached_block import CachedBlock
from mlx_paged.kv.prefix_cache import PrefixCache


class MissReason(StrEnum):
    """Why the reuse of cached K/V ended at a token: the first reason that applies.

    A prompt reuses the full blocks that agree with it, then a run of leading tokens of one more
    block, but never its own last token. There is no reason (None) if the rest of the prompt is
    shorter than the smallest usable run.
    """

    DISABLED = "disabled"  # the caller did not ask for reuse
    # The prompt without its last token is shorter than the smallest usable run.
    TOO_SHORT = "too_short"
    # More K/V agrees, but the model has recurrent layers and no snapshot of their states is kept
    # there.
    NO_STATE = "no_state"
    EVICTED = "evicted"  # the prompt's next full block was cached and has been evicted
    UNSEEN = "unseen"  # nothing was reused: no cached text begins like this prompt
    DIVERGED = "diverged"  # the cached text that agrees longest continues differently
    END = "end"  # the cached text ends there


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a prompt, and what a new sequence gets of it."""

    hashes: list[bytes]  # of the full blocks of the prefix
    # For each layer group the blocks with these hashes that a sequence keeps: the last ones.
    blocks: list[list[CachedBlock]]
    # For each group a further block, whose first tokens agree with the prompt. Empty if there is
    # no such block, or too few tokens agree for a copy to be worth it.
    tails: list[CachedBlock]
    num_cached: int  # leading tokens of the prompt that are found
    miss: MissReason | None  # why the reuse ended there; None if all that can be reused is
    checkpoint: Any = None  # what is kept at its end beside blocks; None: nothing
    longer: int = 0  # length of a longer cached prefix that cannot be reused; 0: there is none
    copies: Sequence[BlockCopy] = ()  # block copies to perform, in order, before any write


@dataclass(slots=True)
class NeededBlock:
    """A full block that a prompt could reuse."""

    index: int  # which block of the prompt it is
    group: int  # its layer group
    known: CachedBlock  # its content; the block is ABSENT if the pool lacks it
    key: bytes  # as :func:`block_key`
    is_state: bool = False  # whether a state after the block is needed, not the block's K/V

    def find(self, prefixes: Sequence[PrefixCache]) -> CachedBlock | None:
        """What the pool has of it now."""
        return prefixes[self.group].find(self.known.hash, self.known.parent, self.known.tokens)


def block_key(hash: bytes, group: int) -> bytes:
    """The name of a block outside the pool, 24 bytes."""
    return hash + group.to_bytes(8, "little", signed=True)


def miss_reason(
    min_run: int, start: int, stop: int, run: int, was_evicted: bool, goes_on: bool
) -> MissReason | None:
    """Why the reuse of ``[0, stop)`` ended after full blocks up to `start` and a run. `goes_on`:
    cached text that agrees up to there continues differently."""
    if stop < min_run:
        return MissReason.TOO_SHORT
    if stop - start < min_run or start + run == stop:
        return None
    if was_evicted:
        return MissReason.EVICTED
    if start + run == 0:
        return MissReason.UNSEEN
    return MissReason.DIVERGED if goes_on else MissReason.END
