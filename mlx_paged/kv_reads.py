"""How much K/V a step's attention has to read. Knows no mlx."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


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

    @classmethod
    def of(cls, layers: Iterable[tuple[int | None, int]], block_size: int) -> "KVReads":
        """From the window of each layer, 0 where it stores nothing, and its bytes a token."""
        token_bytes: dict[int | None, int] = {}
        for window, size in layers:
            if window == 0:
                continue
            token_bytes[window] = token_bytes.get(window, 0) + size
        return cls(token_bytes, block_size)

    def num_bytes(self, starts: IntArray, stops: IntArray) -> int:
        """Bytes that tokens at ``[start, stop)`` of each sequence attend to, each read once."""
        return sum(
            size * int((stops - _first_seen(starts, window)).sum())
            for window, size in self.token_bytes.items()
        )

    def num_blocks(self, starts: IntArray, stops: IntArray) -> int:
        """Blocks of each sequence that hold any of these bytes."""
        if not self.token_bytes:
            return 0
        windows = self.token_bytes.keys()
        widest = None if None in windows else max(w for w in windows if w is not None)
        first = _first_seen(starts, widest) // self.block_size
        return int((-(-stops // self.block_size) - first).sum())


def _first_seen(starts: IntArray, window: int | None) -> IntArray | int:
    return 0 if window is None else np.maximum(starts - (window - 1), 0)
