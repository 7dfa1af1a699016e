"""How much K/V a step's attention has to read. Knows no mlx."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mlx_paged.scheduler.step import Span

IntArray = npt.NDArray[np.int64]


STOCK_GROWTH = 256
"""Tokens by which mlx-lm's own caches grow."""


class Contexts:
    """Where the spans of a step end in their sequences, and where they start.

    Attributes:
        stops: ``[S]``, tokens of each sequence, those of its span included.
        total: their sum.
        longest: the largest.
        blocks: blocks that hold them.
        stock_steps: steps of STOCK_GROWTH tokens that hold them in mlx-lm's own caches.
    """

    def __init__(self, spans: Sequence[Span], sizes: IntArray) -> None:
        """`sizes` is ``[2, 1]``: tokens of a block and STOCK_GROWTH."""
        stops = [span.stop for span in spans]
        self.stops: IntArray = np.array(stops, np.int64)
        self.total = sum(stops)
        self.longest = max(stops, default=0)
        pieces = (self.stops + (sizes - 1)) // sizes
        self.blocks: int
        self.stock_steps: int
        self.blocks, self.stock_steps = np.add.reduce(pieces, axis=1).tolist()
        self._spans = spans

    @cached_property
    def starts(self) -> IntArray:
        """``[S]``, tokens of each sequence before its span."""
        return np.array([span.start for span in self._spans], np.int64)

    def first_seen(self, window: int) -> IntArray:
        """``[S]``, the first position that a span's tokens see through a window."""
        return np.maximum(self.starts - (window - 1), 0)


@dataclass(frozen=True, slots=True)
class KVReads:
    """What a token's K/V takes in the layers of each window.

    Attributes:
        token_bytes: by the window of tokens that a layer sees (None: everything), bytes of one
            token's K/V over all such layers.
        block_size: token slots in a block.
    """

    token_bytes: dict[int | None, int]
    block_size: int
    _sizes: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sizes", np.array([[self.block_size], [STOCK_GROWTH]]))

    @classmethod
    def of(cls, layers: Iterable[tuple[int | None, int]], block_size: int) -> "KVReads":
        """From the window of each layer, 0 where it stores nothing, and its bytes a token."""
        token_bytes: dict[int | None, int] = {}
        for window, size in layers:
            if window != 0:
                token_bytes[window] = token_bytes.get(window, 0) + size
        return cls(token_bytes, block_size)

    def contexts(self, spans: Sequence[Span]) -> Contexts:
        """What the two methods below want to know of a step."""
        return Contexts(spans, self._sizes)

    def num_bytes(self, contexts: Contexts) -> int:
        """Bytes that the tokens of each span attend to, each read once."""
        total = contexts.total * sum(self.token_bytes.values())
        for window, size in self.token_bytes.items():
            if window is not None:
                total -= size * int(contexts.first_seen(window).sum())
        return total

    def num_blocks(self, contexts: Contexts) -> int:
        """Blocks of each sequence that hold any of these bytes."""
        if not self.token_bytes:
            return 0
        if None in self.token_bytes:
            return contexts.blocks
        widest = max(window for window in self.token_bytes if window is not None)
        return contexts.blocks - int((contexts.first_seen(widest) // self.block_size).sum())
