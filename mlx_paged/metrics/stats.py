"""What an engine computed and stored. Knows no mlx."""

import resource
import sys
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

STATM = "/proc/self/statm"
NUM_TTFTS = 10_000  # number of latest times to first token that the statistics use


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
    drafts_by_depth: list[list[int]] = field(default_factory=list)
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
    # What the system said of its memory, and what was given back to it; None: nobody watches.
    pressure: dict[str, Any] | None = None
    ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TTFTS))

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / self.block_size

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
    pages = _pages()
    if pages is not None:
        return pages[1] * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def file_bytes() -> int:
    """Bytes of :func:`resident_bytes` that are pages of files, such as the code of libraries. 0
    where /proc is missing."""
    pages = _pages()
    return 0 if pages is None else pages[2] * resource.getpagesize()


def _pages() -> list[int] | None:
    """The columns of Linux's file: pages of address space, those of them in memory, those of files
    among these, and others. None where it is missing."""
    statm = Path(STATM)
    return [int(each) for each in statm.read_text().split()] if statm.exists() else None


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
