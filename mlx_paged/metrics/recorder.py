"""Measures an engine's steps for its statistics and its log of ticks. Knows no mlx."""

import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from os import PathLike
from typing import Any

from mlx_paged.metrics.stats import EngineStats, KVReads
from mlx_paged.metrics.tick_log import PHASES, Tick, TickLog
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import Step, StepResult


class GcPauses:
    """Measures garbage collections with `clock` while this object lives."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0  # on the watched thread
        self.elsewhere = 0.0  # seconds on other threads
        self.clock = clock
        self._thread = threading.get_ident()
        self._started: float | None = None
        note = weakref.WeakMethod(self._note)  # a bound method would keep this object alive

        def callback(phase: str, info: dict[str, int]) -> None:
            if (alive := note()) is not None:
                alive(phase)

        gc.callbacks.append(callback)
        self.close = weakref.finalize(self, gc.callbacks.remove, callback)
        self.close.atexit = False

    def watch(self) -> None:
        self._thread = threading.get_ident()

    def _note(self, phase: str) -> None:
        if phase == "start":
            self._started = self.clock()
        elif self._started is not None:
            pause, self._started = self.clock() - self._started, None
            if threading.get_ident() == self._thread:
                self.seconds += pause
            else:
                self.elsewhere += pause


class PhaseTimes:
    """Sums the time of each phase, without the time of phases nested in it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner = 0.0  # of phases nested in the current one

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count the time in this context as `phase`."""
        started, outer = self._clock(), self._inner
        self._inner = 0.0
        try:
            yield
        finally:
            elapsed = self._clock() - started
            own = elapsed - self._inner
            self._seconds[phase] = self._seconds.get(phase, 0.0) + own
            self._inner = outer + elapsed

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken


class TickWriter:
    """Writes each tick as one JSON line, unbuffered, so that no line is lost when the process ends.

    The first tick overwrites the file. If a later write fails, the writer logs one warning and
    stops writing; the engine continues.

    Raises:
        OSError: the file cannot be opened.
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
    """How ticks are measured and where they are stored."""

    log: TickLog = field(default_factory=TickLog)
    # K/V bytes of a token by window; None: those of the statistics, without windows.
    reads: KVReads | None = None
    phases: PhaseTimes | None = None  # times that a profiling runner measures
    writer: TickWriter | None = None  # to a file


class TickRecorder:
    """Makes one :class:`Tick` of each call that advances the engine, and adds it to `stats`."""

    def __init__(
        self,
        scheduler: Scheduler,  # its counters are read
        stats: EngineStats,  # its counters are updated
        clock: Callable[[], float],  # seconds
        config: RecorderConfig,
    ) -> None:
        self.pauses = GcPauses(clock)
        self._scheduler = scheduler
        self._stats = stats
        self._clock = clock
        self._config = config
        token_bytes = stats.block_bytes // stats.block_size
        self._reads = config.reads or KVReads([(None, token_bytes)], stats.block_size)
        self._unseen = {"decode", "chunk", "copy"}
        self._tick = Tick()

    def metrics(self) -> dict[str, Any]:
        """Counters, current levels and a summary of the latest ticks, as JSON values."""
        stats, scheduler = self._stats, self._scheduler
        allocator = scheduler.allocator
        histogram = allocator.store.refcount_histogram()
        return {
            **stats.as_dict(),
            **self._config.log.summary(),
            "running": len(scheduler.running),
            "waiting": scheduler.num_waiting,
            "blocks_in_use": allocator.blocks_in_use,
            "blocks_cached": allocator.store.num_idle,
            "kv_disk": None if scheduler.tier is None else scheduler.tier.metrics(),
            "refcount_histogram": {str(refs): count for refs, count in histogram.items()},
            "cow_clones_per_token": stats.cow_clones / max(1, stats.generation_tokens),
            "tokens_by_phase": {
                "prefill": stats.prompt_tokens,
                "decode": stats.decode_tokens,
                "prefix_hit": stats.prefix_hit_tokens,
                "sampled": stats.generation_tokens,
            },
        }

    def begin(self) -> None:
        """Call before the engine advances."""
        self.pauses.watch()
        tick = self._tick = Tick(start=self._clock())
        tick.gc_ms, tick.gc_elsewhere_ms = -self.pauses.seconds, -self.pauses.elsewhere

    def results_ready(self) -> None:
        """Call when the step has ended, before its tokens go to their requests."""
        self._tick.output_ms = self.pauses.seconds - self._clock()

    def end(self, result: StepResult) -> None:
        """Call after the engine advanced."""
        if result.step is None and result.fault is None:
            return
        tick, pauses = self._tick, self.pauses
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
        if self._config.phases is not None:
            seconds = self._config.phases.take()
            for name in PHASES:
                setattr(tick, name, 1000 * seconds.get(name.removesuffix("_ms"), 0.0))
        tick.launched_prefill_tokens = sum([step.prompt_tokens for step in result.launched])
        tick.faults = int(result.fault is not None)
        if result.step is not None:
            self._record_step(tick, result, result.step)
        self._record_levels(tick)
        self._config.log.add(tick)
        if self._config.writer is not None:
            self._config.writer.write(tick)

    def _record_step(self, tick: Tick, result: StepResult, step: Step) -> None:
        spans, work = step.spans, step.work
        stats, reads = self._stats, self._reads.of(spans)
        tick.live_tokens = reads.tokens
        tick.prefill_tokens = step.prompt_tokens
        tick.decode_tokens = work.decode_rows + work.chunk_tokens - step.prompt_tokens
        tick.sampled = len(result.choices)
        tick.kv_bytes_read = reads.kv_bytes
        tick.blocks_touched = reads.blocks
        seconds = result.seconds + tick.gc_ms / 1000
        stats.steps += 1
        stats.seconds += seconds
        stats.prefill_seconds += seconds if tick.prefill_tokens else 0.0
        stats.decode_seconds += seconds if tick.decode_tokens else 0.0
        stats.prompt_tokens += tick.prefill_tokens
        stats.generation_tokens += tick.sampled
        stats.peak_running = max(stats.peak_running, len(spans))
        stats.peak_blocks_in_use = max(stats.peak_blocks_in_use, result.blocks_in_use)
        stats.record_memory(reads)
        stats.decode_tokens += tick.decode_tokens
        stats.kv_bytes_read += tick.kv_bytes_read
        stats.blocks_touched += tick.blocks_touched

    def _record_levels(self, tick: Tick) -> None:
        """Current levels, and how much the counters grew since the tick before."""
        stats, scheduler = self._stats, self._scheduler
        allocator = scheduler.allocator
        tick.running, tick.waiting = len(scheduler.running), len(scheduler.waiting)
        if scheduler.tier is not None:
            tick.waiting += len(scheduler.tier.loading)
        tick.blocks_in_use, tick.blocks_cached = allocator.blocks_in_use, allocator.store.num_idle
        stats.blocks_in_use = tick.blocks_in_use
        tick.preemptions = scheduler.num_preemptions - stats.preemptions
        tick.cow_clones = allocator.store.cow_clones - stats.cow_clones
        tick.evictions = allocator.store.evictions - stats.evictions
        tick.prefix_hit_tokens = allocator.prefix_hit_tokens - stats.prefix_hit_tokens
        stats.preemptions += tick.preemptions
        stats.cow_clones += tick.cow_clones
        stats.evictions += tick.evictions
        stats.prefix_hit_tokens += tick.prefix_hit_tokens
        if scheduler.speculation is not None:
            stats.drafts = scheduler.speculation.num_drafted
            stats.accepted_drafts = scheduler.speculation.num_accepted

    def _is_new(self, launched: list[Step]) -> bool:
        """Whether these steps do a kind of work that no step before did."""
        found = set()
        for step in launched:
            work = {
                "decode": step.work.decode_rows,
                "chunk": step.work.chunk_tokens,
                "copy": step.copies,
            }
            found |= {kind for kind in self._unseen if work[kind]}
        self._unseen -= found
        return bool(found)
