"""What an engine did and held. Knows no mlx."""

from collections import deque
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from mlx_paged.kv.allocation import ceil_div
from mlx_paged.metrics.kv_reads import STOCK_GROWTH, Contexts

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
