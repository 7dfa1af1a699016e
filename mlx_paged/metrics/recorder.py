"""Keeps an engine's statistics and its log of ticks. Knows no mlx."""

import json
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from io import FileIO
from os import PathLike
from typing import Any

from mlx_paged.metrics.stats import EngineStats, KVReads
from mlx_paged.metrics.tick import Tick
from mlx_paged.metrics.tick_log import TickLog
from mlx_paged.metrics.timers import GcPauses, PhaseTimes
from mlx_paged.scheduler.runner_protocol import StepResult
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import Step


class TickWriter:
    """Writes a line per tick, each of them whole, so that nothing is lost when the process ends.

    What the file held before is replaced with the first tick. A file that can no longer be written
    is given up with one warning: the engine goes on.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._failed = False
        open(path, "ab").close()

    def write(self, tick: Tick) -> None:
        if self._failed:
            return
        try:
            if self._file is None:
                self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            self._file.write(json.dumps(tick.as_dict()).encode() + b"\n")
        except OSError as error:
            self._failed = True
            logging.warning("no more ticks are written: %s", error)


@dataclass(frozen=True, slots=True)
class RecorderConfig:
    """What ticks are measured with, and where they go.

    Attributes:
        log: takes the ticks.
        reads: what K/V a token costs; None: as the engine's statistics say, without windows.
        phases: times that a profiling runner takes.
        writer: takes the ticks, too.
    """

    log: TickLog = field(default_factory=TickLog)
    reads: KVReads | None = None
    phases: PhaseTimes | None = None
    writer: TickWriter | None = None


class TickRecorder:
    """Makes one :class:`Tick` of each call that advances the engine, and counts it in `stats`.

    Args:
        scheduler: whose counters are read.
        stats: counters to keep.
        clock: seconds.

    Attributes:
        working_clock: the same without the garbage collector's pauses.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stats: EngineStats,
        clock: Callable[[], float],
        instruments: RecorderConfig,
    ) -> None:
        self._pauses = GcPauses(clock)
        self.working_clock = self._pauses.working
        self._scheduler = scheduler
        self._stats = stats
        self._clock = clock
        self._log = instruments.log
        self._phases = instruments.phases
        self._writer = instruments.writer
        token_bytes = stats.block_bytes // stats.block_size
        self._reads = instruments.reads or KVReads({None: token_bytes}, stats.block_size)
        self._unseen = {"decode", "chunk", "copy"}
        self._counted = self._counters()
        self._tick = Tick()

    def metrics(self) -> dict[str, Any]:
        """Counters, levels now, and what the latest ticks come to; JSON values."""
        stats, scheduler = self._stats, self._scheduler
        allocator = scheduler.allocator
        histogram = allocator.refcount_histogram
        return (
            stats.as_dict()
            | self._log.summary()
            | {
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "blocks_in_use": allocator.blocks_in_use,
                "blocks_cached": allocator.num_cached,
                "refcount_histogram": {str(refs): count for refs, count in histogram.items()},
                "cow_clones_per_token": stats.cow_clones / max(1, stats.generation_tokens),
                "tokens_by_phase": {
                    "prefill": stats.prompt_tokens,
                    "decode": stats.decode_tokens,
                    "prefix_hit": stats.prefix_hit_tokens,
                    "sampled": stats.generation_tokens,
                },
            }
        )

    def begin(self) -> None:
        """The engine is about to advance."""
        self._pauses.watch()
        tick = self._tick = Tick(start=self._clock())
        tick.gc_ms, tick.gc_elsewhere_ms = -self._pauses.seconds, -self._pauses.elsewhere

    def results_ready(self) -> None:
        """The step is over; its tokens go to their requests now."""
        self._tick.output_ms = -self._pauses.working()

    def end(self, result: StepResult) -> None:
        """The engine has advanced."""
        if result.step is None and result.fault is None:
            return
        tick, pauses = self._tick, self._pauses
        ended = self._clock()
        tick.tick_ms = 1000 * (ended - tick.start)
        tick.gc_ms = 1000 * (tick.gc_ms + pauses.seconds)
        tick.gc_elsewhere_ms = 1000 * (tick.gc_elsewhere_ms + pauses.elsewhere)
        tick.output_ms = 1000 * (tick.output_ms + ended - pauses.seconds)
        tick.schedule_ms = 1000 * result.schedule_seconds
        tick.launch_ms = 1000 * result.launch_seconds
        tick.wait_ms = 1000 * result.wait_seconds
        known = tick.schedule_ms + tick.launch_ms + tick.wait_ms + tick.output_ms + tick.gc_ms
        tick.other_ms = max(0.0, tick.tick_ms - known)
        if self._unseen and self._is_new(result.launched):
            tick.prewarm_ms = tick.launch_ms + tick.wait_ms
        if self._phases is not None:
            self._note_phases(tick, self._phases)
        tick.launched_prefill_tokens = result.launched_prompt_tokens
        tick.faults = int(result.fault is not None)
        if result.step is not None:
            self._note_step(tick, result, result.step)
        self._note_levels(tick)
        self._log.add(tick)
        if self._writer is not None:
            self._writer.write(tick)

    def _note_step(self, tick: Tick, result: StepResult, step: Step) -> None:
        spans = step.spans
        stats, reads = self._stats, self._reads
        contexts = reads.contexts(spans)
        tick.live_tokens = contexts.total
        tick.prefill_tokens = result.prompt_tokens
        tick.decode_tokens = step.decode_rows + step.chunk_tokens - result.prompt_tokens
        tick.sampled = len(result.choices)
        tick.kv_bytes_read = reads.num_bytes(contexts)
        tick.blocks_touched = reads.num_blocks(contexts)
        stats.record_step(
            result.seconds + tick.gc_ms / 1000,
            tick.prefill_tokens,
            tick.sampled,
            len(spans),
            result.blocks_in_use,
        )
        stats.record_memory(contexts)
        stats.decode_tokens += tick.decode_tokens
        stats.kv_bytes_read += tick.kv_bytes_read
        stats.blocks_touched += tick.blocks_touched

    def _note_levels(self, tick: Tick) -> None:
        """Levels now, and how far the counters have moved since the tick before."""
        stats, scheduler = self._stats, self._scheduler
        allocator = scheduler.allocator
        tick.running, tick.waiting = len(scheduler.running), len(scheduler.waiting)
        tick.blocks_in_use, tick.blocks_cached = allocator.blocks_in_use, allocator.num_cached
        counters = self._counters()
        stats.blocks_in_use = tick.blocks_in_use
        changes = [now - before for now, before in zip(counters, self._counted, strict=True)]
        self._counted = counters
        tick.preemptions, tick.cow_clones, tick.evictions, tick.prefix_hit_tokens = changes
        stats.preemptions += tick.preemptions
        stats.cow_clones += tick.cow_clones
        stats.evictions += tick.evictions
        stats.prefix_hit_tokens += tick.prefix_hit_tokens

    def _counters(self) -> tuple[int, int, int, int]:
        allocator = self._scheduler.allocator
        return (
            self._scheduler.num_preemptions,
            allocator.cow_clones,
            allocator.evictions,
            allocator.prefix_hit_tokens,
        )

    def _is_new(self, launched: list[Step]) -> bool:
        """Whether these steps do a kind of work that no step before did."""
        kinds = set()
        for step in launched:
            kinds |= {"decode"} if step.decode_rows else set()
            kinds |= {"chunk"} if step.chunk_tokens else set()
            kinds |= {"copy"} if step.copies else set()
        found = kinds & self._unseen
        self._unseen -= found
        return bool(found)

    def _note_phases(self, tick: Tick, phases: PhaseTimes) -> None:
        seconds = phases.take()
        tick.gather_ms = 1000 * seconds.get("gather", 0.0)
        tick.kv_write_ms = 1000 * seconds.get("kv_write", 0.0)
        tick.attention_ms = 1000 * seconds.get("attention", 0.0)
        tick.forward_ms = 1000 * seconds.get("forward", 0.0)
        tick.sample_ms = 1000 * seconds.get("sample", 0.0)
