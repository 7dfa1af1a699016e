"""How tokens are laid out for a forward, and what of a batch attends together."""

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from mlx_paged.kv.pool import as_int32


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive tokens of one sequence, attended together.

    Attributes:
        first_row: where the chunk begins among the batch's tokens.
        start: position of its first token.
        length: its tokens.
        block_ids: ``[n]`` int32, blocks of the sequence up to the chunk's end.
    """

    first_row: int
    start: int
    length: int
    block_ids: mx.array

    @property
    def context_len(self) -> int:
        return self.start + self.length

    @cached_property
    def tables(self) -> mx.array:
        """``[1, n]`` int32, the blocks as a batch of one."""
        return self.block_ids[None]

    @cached_property
    def context_lens(self) -> mx.array:
        """``[1]`` int32, the context as a batch of one."""
        return as_int32([self.context_len])

    def first_seen(self, window: int, block_size: int) -> int:
        """Where the block begins that holds the first position that the chunk's tokens see."""
        return max(0, self.start - window + 1) // block_size * block_size

    def window_mask(self, window: int, first: int = 0) -> mx.array:
        """``[length, context_len - first]`` bool over the keys from position `first`: causal, and
        no further back than `window` tokens."""
        keys = mx.arange(first, self.context_len)[None]
        queries = mx.arange(self.start, self.context_len)[:, None]
        return (keys <= queries) & (keys > queries - window)


def causal_mask(queries: mx.array, num_keys: int, window: int | None) -> mx.array:
    """Which of the keys from position 0 the queries at these positions see."""
    keys = mx.arange(num_keys)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def narrowest(*windows: int | None) -> int | None:
    """The smallest of these windows; None if none of them is a window."""
    return min((window for window in windows if window is not None), default=None)
