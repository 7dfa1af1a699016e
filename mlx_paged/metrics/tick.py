"""The times and counts of one step of an engine, and why it took far too long. Knows no mlx."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from statistics import median
from typing import Any

SHARE = 0.25  # a part is a cause if it has at least this share of a spike's excess
FEW_TOKENS = 8  # so few prompt tokens, e.g. those of a fork, are not a cause

PARTS = ("schedule_ms", "launch_ms", "wait_ms", "output_ms", "gc_ms", "other_ms")
"""`tick_ms` is the sum of these."""

PHASES = ("gather_ms", "kv_write_ms", "attention_ms", "forward_ms", "sample_ms")
"""Only a profiling engine measures these."""


@dataclass(slots=True, eq=False)
class Tick:
    """One call of :meth:`Engine.step` that computed something; times in milliseconds.

    With lookahead a tick ends one step and launches the next. `schedule_ms`, `launch_ms`,
    preemptions, clones, evictions and prefix hits then belong to the launched step. `wait_ms`,
    `output_ms` and the tokens belong to the step that ended.
    """

    index: int = 0  # number of ticks before this one
    start: float = 0.0  # seconds, on the engine's clock
    tick_ms: float = 0.0  # the whole tick, the sum of the six parts
    schedule_ms: float = 0.0  # scheduler, block tables and cost model
    # Building and submitting the graph. On a CPU most computing happens here.
    launch_ms: float = 0.0
    wait_ms: float = 0.0  # until the device has finished and the tokens are on the host
    output_ms: float = 0.0  # appending tokens to their requests and decoding text
    # Python's garbage collector on the engine's thread; the other parts exclude it.
    gc_ms: float = 0.0
    other_ms: float = 0.0  # the rest
    # The garbage collector on other threads. The engine's thread waits for it only where it needs
    # Python. It is not one of the six parts: they include this wait.
    gc_elsewhere_ms: float = 0.0
    # `launch_ms` and `wait_ms` of a tick whose step decodes, computes a chunk or copies blocks for
    # the first time. It includes compilation, which is not measured alone.
    prewarm_ms: float = 0.0
    prefill_tokens: int = 0  # prompt tokens computed, also those of a preempted request
    decode_tokens: int = 0  # other tokens computed
    sampled: int = 0  # tokens sampled
    launched_prefill_tokens: int = 0  # prompt tokens of the launched step
    running: int = 0  # requests that run at the end
    waiting: int = 0  # requests that wait at the end
    preemptions: int = 0  # since the tick before, as are the next three
    cow_clones: int = 0  # blocks copied on write, or copied from a cached prefix
    evictions: int = 0  # cached blocks that were reused for other content
    prefix_hit_tokens: int = 0  # tokens found in the prefix cache
    blocks_in_use: int = 0  # at the end
    blocks_cached: int = 0  # free blocks whose content can still be reused, at the end
    live_tokens: int = 0  # tokens of the computed sequences up to the end of their spans
    blocks_touched: int = 0  # blocks that attention must read, counted for each sequence
    # K/V that attention must read, over all layers and within each layer's window. A kernel may
    # read more.
    kv_bytes_read: int = 0
    shared_keys: int = 0  # keys that a sequence has in the same blocks as another one of the step
    faults: int = 0  # steps that failed
    # These are None unless profiling. They include garbage collections.
    gather_ms: float | None = None  # gathering the contexts of chunks
    kv_write_ms: float | None = None  # writing new K/V and copying blocks
    attention_ms: float | None = None  # without the gather
    forward_ms: float | None = None  # the rest of the model
    sample_ms: float | None = None  # from logits to tokens
    causes: tuple[str, ...] = ()  # of a spike, most likely first; otherwise empty

    @property
    def has_prompt_tokens(self) -> bool:
        """Whether a step with prompt tokens was launched or ended in this tick."""
        return self.prefill_tokens > 0 or self.launched_prefill_tokens > 0

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return dict(zip(NAMES, _values(self), strict=True))


NAMES = tuple(field.name for field in fields(Tick))
TIMES = tuple(name for name in NAMES if name.endswith("_ms"))

_values = attrgetter(*NAMES)
_parts = attrgetter(*PARTS)


@dataclass(frozen=True, slots=True)
class Spike:
    """A tick above the threshold. docs/metrics.md explains the causes."""

    index: int
    start: float
    tick_ms: float
    threshold_ms: float
    causes: tuple[str, ...]


def causes(tick: Tick, usual: Sequence[Tick]) -> tuple[str, ...]:
    """Why `tick` took longer than the `usual` ticks: the parts with the largest excess decide. A
    tick can be a spike by a fixed threshold and take hardly longer: then its whole parts decide."""
    excesses = _excesses(tick, usual)
    if _total(excesses) < SHARE * tick.tick_ms:
        usual = ()
        excesses = _excesses(tick, usual)
    total = _total(excesses)
    if tick.gc_elsewhere_ms > total / 2:
        return ("gc",)
    ranked = sorted(excesses, key=excesses.__getitem__, reverse=True)
    significant = [part for part in ranked if excesses[part] >= SHARE * total] or ranked[:1]
    named = [cause for part in significant for cause in _causes_of_part(part, tick, usual)]
    return tuple(dict.fromkeys(named))


def _excesses(tick: Tick, usual: Sequence[Tick]) -> dict[str, float]:
    """By part of a tick, how many milliseconds more than usual the part took."""
    columns = zip(*map(_parts, usual or [Tick()]), strict=True)
    rows = zip(PARTS, _parts(tick), columns, strict=True)
    return {part: value - median(values) for part, value, values in rows}


def _total(excesses: dict[str, float]) -> float:
    return sum(excess for excess in excesses.values() if excess > 0)


def _causes_of_part(part: str, tick: Tick, usual: Sequence[Tick]) -> list[str]:
    if part == "gc_ms":
        return ["gc"]
    if tick.faults:
        return ["fault"]
    copied = tick.cow_clones > _usual_count("cow_clones", usual)
    if part in ("launch_ms", "wait_ms"):
        launching = part == "launch_ms"
        computed = tick.launched_prefill_tokens if launching else tick.prefill_tokens
        found = {"prewarm": tick.prewarm_ms > 0, "prefill": computed > FEW_TOKENS, "cow": copied}
        otherwise = "launch" if launching else "device"
    elif part == "schedule_ms":
        evicted = tick.evictions > _usual_count("evictions", usual)
        found = {"preemption": tick.preemptions > 0, "eviction": evicted, "cow": copied}
        otherwise = "host"
    else:
        found, otherwise = {}, "host"
    return [cause for cause, holds in found.items() if holds] or [otherwise]


def _usual_count(name: str, usual: Sequence[Tick]) -> float:
    return median(getattr(tick, name) for tick in usual) if usual else 0
