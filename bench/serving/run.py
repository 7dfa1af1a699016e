"""What happened in one run: its ticks and its streams."""

import hashlib
from dataclasses import dataclass, field

from bench.serving.servers import Counters


@dataclass(slots=True)
class Tick:
    """One step of an engine. Times are in milliseconds, but `start_s`; levels are those at its end.

    Attributes:
        start_s: seconds after the start of the run.
        tokens: that came out.
        prompt_tokens: that were computed.
        joined: sequences that began to run.
        left: sequences that ended.
        live_bytes: K/V of the running sequences' contexts, shared or not.
        grown_bytes: change of the K/V memory; 0 for a pool that is allocated up front.
        gc_ms: time of Python's garbage collector.
        stall_ms: the injected stall.
        off_cpu_ms: time in which no thread of the process was computing.
        causes: what the engine itself says about it.
    """

    start_s: float
    tick_ms: float
    tokens: int
    prompt_tokens: int
    running: int
    waiting: int
    joined: int
    left: int
    held_bytes: int
    live_bytes: float
    grown_bytes: int = 0
    blocks_in_use: int | None = None
    preemptions: int = 0
    cow_clones: int = 0
    gc_ms: float = 0.0
    stall_ms: float = 0.0
    off_cpu_ms: float = 0.0
    causes: tuple[str, ...] = ()

    @property
    def end_s(self) -> float:
        return self.start_s + self.tick_ms / 1000


@dataclass(slots=True)
class Stream:
    """One sequence as its client sees it; seconds after the start of the run.

    Attributes:
        arrival_s: when it was due, not when it was handed to the engine.
        times_s: when each token came out.
    """

    job: int
    arrival_s: float
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    is_done: bool = False


@dataclass(slots=True)
class Run:
    """One engine on one trace, once.

    Attributes:
        is_partial: it was interrupted.
        static_blocks: blocks of a static reservation: the longest length for every place.
        peak_rss_bytes: of the process, sampled after every tick.
        peak_mlx_bytes: of MLX's arrays, also within ticks.
    """

    engine: str
    ticks: list[Tick] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    is_partial: bool = False
    pool_bytes: int | None = None
    static_blocks: int = 0
    block_bytes: float = 0.0
    peak_rss_bytes: int = 0
    peak_mlx_bytes: int = 0

    @property
    def wall_s(self) -> float:
        if not self.ticks:
            return 0.0
        first = min((stream.arrival_s for stream in self.streams), default=0.0)
        return self.ticks[-1].end_s - first

    @property
    def output_tokens(self) -> int:
        return sum(tick.tokens for tick in self.ticks)

    @property
    def tokens_digest(self) -> str:
        """Equal if every stream got the same tokens."""
        text = repr([stream.tokens for stream in self.streams])
        return hashlib.sha256(text.encode()).hexdigest()[:16]
