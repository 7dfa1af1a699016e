"""What an engine computed and stored. Knows no mlx."""

import resource
import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_paged.scheduler.step import Span

IntArray = npt.NDArray[np.int64]

STOCK_GROWTH = 256  # mlx-lm's own caches grow by so many tokens at once
NUM_TTFTS = 10_000  # number of latest times to first token that the statistics use


class Reads(NamedTuple):
    """What the spans of a step attend to."""

    num_spans: int
    tokens: int  # of all contexts: a sequence up to the end of its span
    longest: int  # of these contexts
    stock_steps: int  # of STOCK_GROWTH tokens that hold them in mlx-lm's own caches
    kv_bytes: int  # over all layers; a span reads each byte once
    blocks: int  # that hold these bytes, counted for each sequence


class KVReads:
    """Computes how much K/V attention must read. Each layer has a window (None: none, 0: it stores
    nothing) and the bytes of one token's K/V in it."""

    def __init__(self, layers: Iterable[tuple[int | None, int]], block_size: int) -> None:
        stored: Counter[int | None] = Counter()  # by window, of all its layers
        for window, size in layers:
            if window != 0:
                stored[window] += size
        limited = sorted((window, size) for window, size in stored.items() if window is not None)
        self._token_bytes = stored.total()
        self._is_limited = None not in stored  # every layer has a window
        self._windows, self._bytes = np.array(limited, np.int64).reshape(-1, 2, 1).swapaxes(0, 1)
        self._block_size = block_size
        self._sizes: IntArray = np.array([[block_size], [STOCK_GROWTH]])

    def of(self, spans: Sequence[Span]) -> Reads:
        """What a step with these spans reads."""
        stops = [span.stop for span in spans]
        tokens = sum(stops)
        pieces = (np.array(stops, np.int64) + (self._sizes - 1)) // self._sizes
        blocks, stock_steps = np.add.reduce(pieces, axis=1).tolist()
        kv_bytes = tokens * self._token_bytes
        if self._windows.size:
            starts = np.array([span.start for span in spans], np.int64)
            unseen = np.maximum(starts - (self._windows - 1), 0)  # [windows, spans], by any token
            kv_bytes -= int((unseen * self._bytes).sum())
            if self._is_limited:
                blocks -= int((unseen[-1] // self._block_size).sum())  # of the widest window
        blocks = blocks if self._token_bytes else 0
        return Reads(len(stops), tokens, max(stops, default=0), stock_steps, kv_bytes, blocks)


@dataclass(slots=True)
class Traces:
    """Traces of decode steps, which become compiled graphs."""

    count: int = 0  # how many there were
    seconds: float = 0.0  # that they took
    bytes: int = 0  # by which the process grew while its buckets were traced


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
    shared_keys: int = 0
    blocks_in_use: int = 0
    peak_blocks_in_use: int = 0
    peak_running: int = 0
    peak_live_tokens: int = 0
    padded_kv_bytes: int = 0
    contiguous_kv_bytes: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0  # of the steps with prompt tokens
    decode_seconds: float = 0.0  # of the steps with decodes; some steps have both
    prewarm_seconds: float | None = None  # None: nothing was compiled
    # By Metal kernel that the GPU's compiler refuses: its message. Plain MLX runs in its place.
    refused_kernels: dict[str, str] = field(default_factory=dict)
    traces: Traces | None = None  # None: decodes are not compiled
    ranks: dict[str, Any] | None = None  # of a run under mlx.launch; None: one process
    memory_budget: dict[str, int] = field(default_factory=dict)  # bytes at most, by their use
    ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TTFTS))

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / self.block_size

    def record_memory(self, reads: Reads) -> None:
        """Update the peaks of live tokens and of mlx-lm's caches."""
        growth_bytes = STOCK_GROWTH * self.token_bytes
        padded = int(reads.num_spans * -(-reads.longest // STOCK_GROWTH) * growth_bytes)
        contiguous = int(reads.stock_steps * growth_bytes)
        self.peak_live_tokens = max(self.peak_live_tokens, reads.tokens)
        self.padded_kv_bytes = max(self.padded_kv_bytes, padded)
        self.contiguous_kv_bytes = max(self.contiguous_kv_bytes, contiguous)

    def as_dict(self) -> dict[str, Any]:
        """All counters, rates and derived sizes as JSON values."""
        values = asdict(self)
        ttfts = values.pop("ttfts")
        decoding = self.decode_seconds or self.seconds  # no step decodes if one token is asked for
        return values | {
            "prompt_tokens_per_sec": _rate(self.prompt_tokens, self.prefill_seconds),
            "generation_tokens_per_sec": _rate(self.generation_tokens, decoding),
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
