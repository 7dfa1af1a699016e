"""What an engine did and held. Knows no mlx."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_paged.kv.blocks import ceil_div
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


NUM_TTFTS = 10_000
"""Latest times to first token that count in the statistics."""


@dataclass(slots=True)
class EngineStats:
    """Counters of one engine since it was made.

    Prompt tokens and decode tokens are those computed: what a preempted request had counts again.
    Times are in seconds, sizes in bytes. `padded_kv_bytes` and `contiguous_kv_bytes` say what the
    same moments would have cost in mlx-lm's caches: a rectangle as long as its longest row for the
    whole batch, or one cache a sequence, both in steps of 256 tokens.
    """

    block_size: int
    block_bytes: int
    num_blocks: int
    steps: int = 0
    requests_finished: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    decode_tokens: int = 0
    generation_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    faults: int = 0
    cow_clones: int = 0
    evictions: int = 0
    kv_bytes_read: int = 0
    blocks_touched: int = 0
    blocks_in_use: int = 0
    peak_blocks_in_use: int = 0
    peak_running: int = 0
    peak_live_tokens: int = 0
    padded_kv_bytes: int = 0
    contiguous_kv_bytes: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    prewarm_seconds: float | None = None  # None: nothing was compiled
    ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TTFTS))

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / self.block_size

    def record_step(
        self, seconds: float, prompt_tokens: int, sampled: int, spans: int, blocks_in_use: int
    ) -> None:
        """Count a step: `prompt_tokens` were computed in it, `sampled` tokens came out."""
        self.steps += 1
        self.seconds += seconds
        self.prompt_tokens += prompt_tokens
        self.generation_tokens += sampled
        if prompt_tokens:
            self.prefill_seconds += seconds
        self.peak_running = max(self.peak_running, spans)
        self.peak_blocks_in_use = max(self.peak_blocks_in_use, blocks_in_use)

    def record_memory(self, contexts: Contexts) -> None:
        """Compare with other caches, given what each running sequence has."""
        growth_bytes = STOCK_GROWTH * self.token_bytes
        padded = int(contexts.stops.size * ceil_div(contexts.longest, STOCK_GROWTH) * growth_bytes)
        contiguous = int(contexts.stock_steps * growth_bytes)
        self.peak_live_tokens = max(self.peak_live_tokens, contexts.total)
        self.padded_kv_bytes = max(self.padded_kv_bytes, padded)
        self.contiguous_kv_bytes = max(self.contiguous_kv_bytes, contiguous)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values, rates and derived sizes included."""
        values = asdict(self)
        ttfts = values.pop("ttfts")
        values |= {
            "prompt_tokens_per_sec": _rate(self.prompt_tokens, self.prefill_seconds),
            "generation_tokens_per_sec": _rate(self.generation_tokens, self.seconds),
            "ttft_median_s": median(ttfts) if ttfts else None,
            "ttft_max_s": max(ttfts, default=None),
            "kv_pool_bytes": self.num_blocks * self.block_bytes,
            "peak_kv_bytes": self.peak_blocks_in_use * self.block_bytes,
            "peak_live_kv_bytes": int(self.peak_live_tokens * self.token_bytes),
        }
        return values


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
