"""What an engine computed and stored. Knows no mlx."""

import resource
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_paged.kv.blocks import ceil_div
from mlx_paged.scheduler.step import Span

IntArray = npt.NDArray[np.int64]

STOCK_GROWTH = 256
"""mlx-lm's own caches grow by so many tokens at once."""

NUM_TTFTS = 10_000
"""Number of latest times to first token that the statistics use."""


class Contexts:
    """The context lengths of a step's spans.

    Args:
        sizes: ``[2, 1]``, the block size and STOCK_GROWTH.
    """

    def __init__(self, spans: Sequence[Span], sizes: IntArray) -> None:
        stops = [span.stop for span in spans]
        # [S], tokens of each sequence up to the end of its span
        self.stops: IntArray = np.array(stops, np.int64)
        self.total = sum(stops)
        self.longest = max(stops, default=0)
        pieces = (self.stops + (sizes - 1)) // sizes
        self.blocks: int  # that hold these tokens
        self.stock_steps: int  # of STOCK_GROWTH tokens that hold them in mlx-lm's own caches
        self.blocks, self.stock_steps = np.add.reduce(pieces, axis=1).tolist()
        self._spans = spans

    @cached_property
    def starts(self) -> IntArray:
        """``[S]``, tokens of each sequence before its span."""
        return np.array([span.start for span in self._spans], np.int64)

    def first_seen(self, window: int) -> IntArray:
        """``[S]``, the first position that any token of a span attends to through a window."""
        return np.maximum(self.starts - (window - 1), 0)


class KVReads:
    """Computes how much K/V attention must read.

    Attributes:
        token_bytes: by window size (None: no window), bytes of one token's K/V in all layers that
            have this window.
        block_size: token slots in a block.
    """

    def __init__(self, token_bytes: dict[int | None, int], block_size: int) -> None:
        self.token_bytes = token_bytes
        self.block_size = block_size
        self._sizes: IntArray = np.array([[block_size], [STOCK_GROWTH]])

    @classmethod
    def of(cls, layers: Iterable[tuple[int | None, int]], block_size: int) -> "KVReads":
        """From each layer's window (0: the layer stores nothing) and its bytes per token."""
        token_bytes: dict[int | None, int] = {}
        for window, size in layers:
            if window != 0:
                token_bytes[window] = token_bytes.get(window, 0) + size
        return cls(token_bytes, block_size)

    def contexts(self, spans: Sequence[Span]) -> Contexts:
        """The context lengths of a step, for the methods below."""
        return Contexts(spans, self._sizes)

    def num_bytes(self, contexts: Contexts) -> int:
        """Bytes that the tokens of each span attend to. A span reads each byte once."""
        total = contexts.total * sum(self.token_bytes.values())
        for window, size in self.token_bytes.items():
            if window is not None:
                total -= size * int(contexts.first_seen(window).sum())
        return total

    def num_blocks(self, contexts: Contexts) -> int:
        """Number of blocks that hold these bytes, counted for each sequence."""
        if not self.token_bytes:
            return 0
        if None in self.token_bytes:
            return contexts.blocks
        widest = max(window for window in self.token_bytes if window is not None)
        return contexts.blocks - int((contexts.first_seen(widest) // self.block_size).sum())


@dataclass(slots=True)
class Traces:
    """Traces of decode steps, which become compiled graphs.

    Attributes:
        count: how many there were.
        seconds: that they took.
        bytes: by which the process grew while its buckets were traced.
    """

    count: int = 0
    seconds: float = 0.0
    bytes: int = 0


@dataclass(slots=True)
class EngineStats:
    """Counters of one engine since it was made.

    Prompt tokens and decode tokens count each time they are computed; a preempted request computes
    its tokens again. `drafts` are guessed tokens that were computed; `accepted_drafts` of them were
    right. Times are in seconds, sizes in bytes. `padded_kv_bytes` and `contiguous_kv_bytes` are the
    peak memory that mlx-lm's caches would have needed: one rectangle for the batch, as long as its
    longest row, or one cache for each sequence. Both grow in steps of 256 tokens.
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
    drafts: int = 0
    accepted_drafts: int = 0
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
    traces: Traces | None = None  # None: decodes are not compiled
    ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TTFTS))

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / self.block_size

    def record_memory(self, contexts: Contexts) -> None:
        """Update the peaks of live tokens and of mlx-lm's caches."""
        growth_bytes = STOCK_GROWTH * self.token_bytes
        padded = int(contexts.stops.size * ceil_div(contexts.longest, STOCK_GROWTH) * growth_bytes)
        contiguous = int(contexts.stock_steps * growth_bytes)
        self.peak_live_tokens = max(self.peak_live_tokens, contexts.total)
        self.padded_kv_bytes = max(self.padded_kv_bytes, padded)
        self.contiguous_kv_bytes = max(self.contiguous_kv_bytes, contiguous)

    def as_dict(self) -> dict[str, Any]:
        """All counters, rates and derived sizes as JSON values."""
        values = asdict(self)
        ttfts = values.pop("ttfts")
        return values | {
            "prompt_tokens_per_sec": _rate(self.prompt_tokens, self.prefill_seconds),
            "generation_tokens_per_sec": _rate(self.generation_tokens, self.seconds),
            "ttft_median_s": median(ttfts) if ttfts else None,
            "ttft_max_s": max(ttfts, default=None),
            "kv_pool_bytes": self.num_blocks * self.block_bytes,
            "peak_kv_bytes": self.peak_blocks_in_use * self.block_bytes,
            "peak_live_kv_bytes": int(self.peak_live_tokens * self.token_bytes),
        }


def resident_bytes() -> int:
    """Memory that the process has now. Where /proc is missing: the most that it ever had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
