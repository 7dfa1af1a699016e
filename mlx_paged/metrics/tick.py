"""One step of an engine in numbers: where its time went, what it computed. Knows no mlx."""

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

PARTS = ("schedule_ms", "launch_ms", "wait_ms", "output_ms", "gc_ms", "other_ms")
"""What `tick_ms` is the sum of."""

PHASES = ("gather_ms", "kv_write_ms", "attention_ms", "forward_ms", "sample_ms")
"""What only a profiling engine knows."""


@dataclass(slots=True, eq=False)
class Tick:
    """One call of :meth:`Engine.step` that computed something; times in milliseconds.

    An engine that looks ahead ends one step and launches the next in the same tick. Then
    `schedule_ms`, `launch_ms` and the changes (preemptions, clones, evictions, prefix hits) belong
    to the step that was launched, `wait_ms`, `output_ms` and the tokens to the one that ended.

    Attributes:
        index: ticks before this one.
        start: seconds, on the engine's clock.
        tick_ms: all of it; the six parts add up to it.
        schedule_ms: deciding what is computed, block tables and cost model included.
        launch_ms: building the graph and handing it over. On a CPU most computing happens here.
        wait_ms: until the device was done and the tokens were on the host.
        output_ms: tokens to their requests and to text.
        gc_ms: Python's garbage collector on the engine's thread; left out of the other parts.
        other_ms: the rest.
        gc_elsewhere_ms: the same on other threads. It holds up the engine only where that needs
            Python, so it is no part: its effect is in the others.
        prewarm_ms: `launch_ms` and `wait_ms` of a tick whose step decodes, computes a chunk or
            copies blocks for the first time: compilation is in it and cannot be told apart.
        prefill_tokens: prompt tokens computed, those of a preempted request again.
        decode_tokens: other tokens computed.
        sampled: tokens that came out.
        launched_prefill_tokens: prompt tokens of the step that was launched.
        running: requests, at the end.
        waiting: requests, at the end.
        preemptions: since the tick before, as are the next three.
        cow_clones: blocks copied on write, or copied from a cached prefix.
        evictions: cached blocks that were given to others.
        prefix_hit_tokens: tokens found in the prefix cache.
        blocks_in_use: at the end.
        blocks_cached: free blocks whose content may be found again, at the end.
        live_tokens: of the sequences computed, these tokens included.
        blocks_touched: blocks that attention had to read, once for each sequence that reads them.
        kv_bytes_read: live K/V that attention had to read, over all layers, each layer's window
            considered. What must be read, not what a kernel does read.
        faults: steps that failed.
        gather_ms: copying chunks' contexts together. These five are None unless profiling; they
            count garbage collections that fall into them.
        kv_write_ms: new K/V to its slots, and block copies.
        attention_ms: without the gather.
        forward_ms: the rest of the model.
        sample_ms: from logits to tokens.
        causes: of a spike, most likely first; else empty.
    """

    index: int = 0
    start: float = 0.0
    tick_ms: float = 0.0
    schedule_ms: float = 0.0
    launch_ms: float = 0.0
    wait_ms: float = 0.0
    output_ms: float = 0.0
    gc_ms: float = 0.0
    other_ms: float = 0.0
    gc_elsewhere_ms: float = 0.0
    prewarm_ms: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    sampled: int = 0
    launched_prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    cow_clones: int = 0
    evictions: int = 0
    prefix_hit_tokens: int = 0
    blocks_in_use: int = 0
    blocks_cached: int = 0
    live_tokens: int = 0
    blocks_touched: int = 0
    kv_bytes_read: int = 0
    faults: int = 0
    gather_ms: float | None = None
    kv_write_ms: float | None = None
    attention_ms: float | None = None
    forward_ms: float | None = None
    sample_ms: float | None = None
    causes: tuple[str, ...] = ()

    @property
    def has_prompt_tokens(self) -> bool:
        """Whether a step with prompt tokens was launched or ended in it."""
        return self.prefill_tokens > 0 or self.launched_prefill_tokens > 0

    def counts(self) -> dict[str, int]:
        """What does not depend on time: the same in every run with the same seed."""
        return {name: getattr(self, name) for name in COUNTS}

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return dict(zip(NAMES, _values(self), strict=True))


NAMES = tuple(field.name for field in fields(Tick))
TIMES = tuple(name for name in NAMES if name.endswith("_ms"))
COUNTS = tuple(field.name for field in fields(Tick) if field.type is int and field.name != "index")

_values = attrgetter(*NAMES)
