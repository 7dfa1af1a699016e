"""What happened in one run: its ticks and its streams."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from bench.serving.servers import Counters


@dataclass(slots=True)
class Tick:
    """One step of an engine; levels are those at its end."""

    start_s: float  # seconds after the start of the run
    tick_ms: float  # milliseconds, as all other times
    tokens: int  # that came out
    prompt_tokens: int  # that were computed
    running: int
    waiting: int
    joined: int  # sequences that began to run
    left: int  # sequences that ended
    held_bytes: int
    live_bytes: float  # K/V of the running sequences' contexts, shared or not
    grown_bytes: int = 0  # change of the K/V memory; 0 for a pool that is allocated up front
    blocks_in_use: int | None = None
    preemptions: int = 0
    cow_clones: int = 0
    gc_ms: float = 0.0  # Python's garbage collector
    stall_ms: float = 0.0  # the injected stall
    off_cpu_ms: float = 0.0  # time in which no thread of the process was computing
    causes: tuple[str, ...] = ()  # what the engine itself says about it

    @property
    def end_s(self) -> float:
        return self.start_s + self.tick_ms / 1000


@dataclass(slots=True)
class Stream:
    """One sequence as its client sees it; seconds after the start of the run."""

    job: int
    arrival_s: float  # when it was due, not when it was handed to the engine
    times_s: list[float] = field(default_factory=list)  # of each token; over HTTP, of each piece
    tokens: list[Any] = field(default_factory=list)  # ids; over HTTP, the characters of the text
    is_done: bool = False
    counted: int | None = None  # tokens as a server counts them

    @property
    def num_tokens(self) -> int:
        return len(self.times_s) if self.counted is None else self.counted


@dataclass(slots=True)
class Run:
    """One engine on one trace, once; a server's run over HTTP has no ticks."""

    engine: str
    ticks: list[Tick] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    is_partial: bool = False  # it was interrupted
    pool_bytes: int | None = None
    static_blocks: int = 0  # of a static reservation: the longest length for every place
    block_bytes: float = 0.0
    peak_rss_bytes: int = 0  # of the process, sampled after every tick
    peak_mlx_bytes: int = 0  # of MLX's arrays, also within ticks
    failures: list[str] = field(default_factory=list)  # over HTTP, why each stream failed
    client_cpu_s: float | None = None  # over HTTP, what the bench itself computed

    @property
    def wall_s(self) -> float:
        ends = [stream.times_s[-1] for stream in self.streams if stream.times_s]
        ends += [tick.end_s for tick in self.ticks[-1:]]
        first = min((stream.arrival_s for stream in self.streams), default=0.0)
        return max(ends, default=first) - first

    @property
    def output_tokens(self) -> int:
        if self.ticks:
            return sum(tick.tokens for tick in self.ticks)
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def tokens_digest(self) -> str:
        """Equal if every stream got the same tokens."""
        text = repr([stream.tokens for stream in self.streams])
        return hashlib.sha256(text.encode()).hexdigest()[:16]
