"""Measures an engine's steps: their ticks, the log that keeps them, and the statistics. Knows no
mlx."""

import gc
import json
import logging
import threading
import time
import weakref
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import FileIO
from operator import add, attrgetter
from os import PathLike
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_paged.metrics.stats import EngineStats
from mlx_paged.metrics.tick import PHASES, TIMES, Spike, Tick, causes
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import Span, StepReport, StepResult

LOGGER = logging.getLogger(__name__)

STOCK_GROWTH = 256  # mlx-lm's own caches grow by so many tokens at once

CAPACITY = 8192
NUM_SPIKES = 1000

BUCKETS_MS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000)
"""Upper bounds of the histograms' buckets; the last bucket has no bound."""

PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "max": 100}

FLOOR_MS = 50.0  # without a given threshold, a tick is a spike only above this time
FACTOR = 3.0  # without a given threshold, a spike takes more than this multiple of the usual time
NUM_RECENT = 64  # number of latest ticks that define the usual time
MIN_RECENT = 8  # ticks are not judged before so many of their kind are known

IntArray = npt.NDArray[np.int64]


class GcPauses:
    """Measures garbage collections with `clock` from `watch` to `close`. At other times there is no
    callback: it would swallow a Ctrl-C that comes during a collection."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0  # on the thread that watches
        self.elsewhere = 0.0  # seconds on other threads
        self.clock = clock
        self._thread = 0
        self._started: float | None = None

    def watch(self) -> None:
        self._thread, self._started = threading.get_ident(), None
        if self._note not in gc.callbacks:
            gc.callbacks.append(self._note)

    def close(self) -> None:
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = self.clock()
            return
        started, self._started = self._started, None  # another thread may begin to watch meanwhile
        if started is not None:
            pause = self.clock() - started
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


class TimeHistogram:
    """How many times fell into each bucket since the engine was made."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_MS) + 1)
        self.sum_ms = 0.0

    def add(self, ms: float) -> None:
        self.counts[bisect_left(BUCKETS_MS, ms)] += 1
        self.sum_ms += ms


class SpikeDetector:
    """Compares each tick with `threshold_ms`, or with FACTOR times the usual time, at least
    FLOOR_MS: the median of recent ticks that only decoded, because running streams expect that
    time. Ticks without decodes are compared with each other."""

    def __init__(self, threshold_ms: float | None = None) -> None:
        self.threshold_ms = threshold_ms
        self._decodes: deque[Tick] = deque(maxlen=NUM_RECENT)
        self._prefills: deque[Tick] = deque(maxlen=NUM_RECENT)
        self._unjudged: deque[Tick] = deque(maxlen=NUM_RECENT)

    def add(self, tick: Tick) -> Iterator[Spike]:
        """Record a tick; yield the spikes found so far and set the causes of their ticks."""
        is_mixed = tick.decode_tokens and (tick.prefill_tokens or tick.launched_prefill_tokens)
        if not tick.faults and not is_mixed:
            self._recent(tick).append(tick)
        if tick.tick_ms > (self.threshold_ms or FLOOR_MS):
            self._unjudged.append(tick)
        for _ in range(len(self._unjudged)):
            late = self._unjudged.popleft()
            if self.threshold_ms is None and len(self._recent(late)) < MIN_RECENT:
                self._unjudged.append(late)
            elif (spike := self._judge(late)) is not None:
                yield spike

    def _recent(self, tick: Tick) -> deque[Tick]:
        return self._decodes if tick.decode_tokens or tick.faults else self._prefills

    def _judge(self, tick: Tick) -> Spike | None:
        usual = [other for other in self._recent(tick) if other is not tick]
        threshold = self.threshold_ms
        if threshold is None:
            usual_ms = median(other.tick_ms for other in usual) if usual else 0.0
            threshold = max(FLOOR_MS, FACTOR * usual_ms)
        if tick.tick_ms <= threshold:
            return None
        tick.causes = causes(tick, usual)
        return Spike(tick.index, tick.start, tick.tick_ms, threshold, tick.causes)


class TickLog(deque[Tick]):
    """A ring buffer of ticks, newest last. Ticks longer than `spike_ms` are spikes; None: see
    :class:`SpikeDetector`. An engine that profiles has slower ticks."""

    def __init__(
        self, capacity: int = CAPACITY, spike_ms: float | None = None, profile: bool = False
    ) -> None:
        super().__init__(maxlen=capacity)
        self.profile = profile
        self.spikes: deque[Spike] = deque(maxlen=NUM_SPIKES)  # newest last
        self.causes: Counter[str] = Counter()  # spikes by first cause, since the engine was made
        self.decode = TimeHistogram()  # of all ticks without prompt tokens
        self.prefill = TimeHistogram()  # of all other ticks
        self.num_ticks = 0
        self._names = [name for name in TIMES if profile or name not in PHASES]
        self._times = attrgetter(*self._names)
        self._totals = [0.0] * len(self._names)
        self._detector = SpikeDetector(spike_ms)

    def add(self, tick: Tick) -> None:
        """Append a tick and set its index."""
        tick.index = self.num_ticks
        self.num_ticks += 1
        self.append(tick)
        self._totals = [*map(add, self._totals, self._times(tick))]
        is_decode = not (tick.prefill_tokens or tick.launched_prefill_tokens)
        (self.decode if is_decode else self.prefill).add(tick.tick_ms)
        for spike in self._detector.add(tick):
            self.spikes.append(spike)
            self.causes[spike.causes[0]] += 1

    @property
    def total_ms(self) -> dict[str, float]:
        """The sum of each measured time since the engine was made."""
        return dict(zip(self._names, self._totals, strict=True))

    def summary(self) -> dict[str, Any]:
        """Percentiles of the held ticks' times, None if not measured; spikes. JSON values."""
        found: dict[str, Any] = {name: self._percentiles(name, self) for name in TIMES}
        decodes = [tick for tick in self if not tick.has_prompt_tokens]
        prefills = [tick for tick in self if tick.has_prompt_tokens]
        found["decode_tick_ms"] = self._percentiles("tick_ms", decodes)
        found["prefill_chunk_ms"] = self._percentiles("tick_ms", prefills)
        return found | {
            "spikes": [asdict(spike) | {"causes": list(spike.causes)} for spike in self.spikes],
            "spike_causes": dict(self.causes),
            "ticks": self.num_ticks,
            "profile": self.profile,
        }

    def _percentiles(self, name: str, ticks: Iterable[Tick]) -> dict[str, float] | None:
        if name not in self._names:
            return None
        values = np.array([getattr(tick, name) for tick in ticks])
        if not values.size:
            return {"count": 0} | dict.fromkeys(PERCENTILES, 0.0)
        found = np.percentile(values, list(PERCENTILES.values())).tolist()
        return {"count": values.size} | dict(zip(PERCENTILES, found, strict=True))


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
            LOGGER.warning("no more ticks are written: %s", error)


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

    def of(self, spans: Sequence[Span]) -> Reads:
        """What a step with these spans reads."""
        tokens = longest = blocks = stock_steps = 0
        for span in spans:
            stop = span.stop
            tokens += stop
            longest = max(longest, stop)
            blocks += -(-stop // self._block_size)
            stock_steps += -(-stop // STOCK_GROWTH)
        kv_bytes = tokens * self._token_bytes
        if self._windows.size:
            starts = np.array([span.start for span in spans], np.int64)
            unseen = np.maximum(starts - (self._windows - 1), 0)  # [windows, spans], by any token
            kv_bytes -= int((unseen * self._bytes).sum())
            if self._is_limited:
                blocks -= int((unseen[-1] // self._block_size).sum())  # of the widest window
        blocks = blocks if self._token_bytes else 0
        return Reads(len(spans), tokens, longest, stock_steps, kv_bytes, blocks)


@dataclass(frozen=True, slots=True)
class RecorderConfig:
    """How ticks are measured and where they are stored."""

    log: TickLog = field(default_factory=TickLog)
    # K/V bytes of a token by window; None: those of the statistics, without windows.
    reads: KVReads | None = None
    phases: PhaseTimes | None = None  # times that a profiling runner measures
    writer: TickWriter | None = None  # to a file
    memory: Callable[[], dict[str, Any]] | None = None  # the account of the process's memory


def record_memory(stats: EngineStats, reads: Reads) -> None:
    """Update the peaks of live tokens and of mlx-lm's caches."""
    growth_bytes = STOCK_GROWTH * stats.block_bytes / stats.block_size
    padded = int(reads.num_spans * -(-reads.longest // STOCK_GROWTH) * growth_bytes)
    contiguous = int(reads.stock_steps * growth_bytes)
    stats.peak_live_tokens = max(stats.peak_live_tokens, reads.tokens)
    stats.padded_kv_bytes = max(stats.padded_kv_bytes, padded)
    stats.contiguous_kv_bytes = max(stats.contiguous_kv_bytes, contiguous)


class TickRecorder:
    """Makes one :class:`Tick` of each call that advances the engine, and adds it to `stats`."""

    def __init__(
        self,
        scheduler: Scheduler,  # its levels are read
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
        self._has_new = False  # whether a step of the tick does a kind of work that none did before
        self._tick = Tick()

    def metrics(self) -> dict[str, Any]:
        """Counters, current levels and a summary of the latest ticks, as JSON values."""
        stats, levels = self._stats, self._scheduler.levels()
        histogram = self._scheduler.refcount_histogram()
        return {
            **stats.as_dict(),
            **self._config.log.summary(),
            "running": levels.running,
            "waiting": levels.waiting,
            "blocks_in_use": levels.blocks_in_use,
            "blocks_cached": levels.blocks_cached,
            "memory": None if self._config.memory is None else self._config.memory(),
            "kv_disk": self._scheduler.tier_metrics(),
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
        self._has_new = False
        tick = self._tick = Tick(start=self._clock())
        tick.gc_ms, tick.gc_elsewhere_ms = -self.pauses.seconds, -self.pauses.elsewhere

    def _note_launched(self, report: StepReport) -> None:
        tick, stats = self._tick, self._stats
        tick.launch_ms += 1000 * report.launch_seconds
        tick.schedule_ms += 1000 * report.commit_seconds
        tick.launched_prefill_tokens += report.step.prompt_tokens
        stats.peak_blocks_in_use = max(stats.peak_blocks_in_use, report.blocks_in_use)
        work, copies = report.step.work, report.step.copies
        rows, tokens = work.decode_rows, work.chunk_tokens
        for kind, is_done in (("decode", rows), ("chunk", tokens), ("copy", copies)):
            if is_done and kind in self._unseen:
                self._unseen.remove(kind)
                self._has_new = True

    def end(self, result: StepResult) -> None:
        """Call after the engine advanced."""
        self.pauses.close()
        for launched in result.launched:
            self._note_launched(launched)
        if result.report is None and result.fault is None:
            return
        tick, pauses, report = self._tick, self.pauses, result.report
        tick.schedule_ms += 1000 * result.plan_seconds
        if report is not None:
            tick.wait_ms = 1000 * report.wait_seconds
            tick.schedule_ms += 1000 * report.settle_seconds
        ended = self._clock()
        tick.tick_ms = 1000 * (ended - tick.start)
        tick.gc_ms = 1000 * (tick.gc_ms + pauses.seconds)
        tick.gc_elsewhere_ms = 1000 * (tick.gc_elsewhere_ms + pauses.elsewhere)
        tick.output_ms = 1000 * (ended - pauses.seconds - result.ready)
        known = tick.schedule_ms + tick.launch_ms + tick.wait_ms + tick.output_ms + tick.gc_ms
        tick.other_ms = max(0.0, tick.tick_ms - known)
        if self._has_new:
            tick.prewarm_ms = tick.launch_ms + tick.wait_ms
        if self._config.phases is not None:
            seconds = self._config.phases.take()
            for name in PHASES:
                setattr(tick, name, 1000 * seconds.get(name.removesuffix("_ms"), 0.0))
        tick.faults = int(result.fault is not None)
        if report is not None:
            self._record_step(tick, report)
        self._record_levels(tick)
        self._config.log.add(tick)
        if self._config.writer is not None:
            self._config.writer.write(tick)

    def _record_step(self, tick: Tick, report: StepReport) -> None:
        step = report.step
        spans, work = step.spans, step.work
        stats, reads = self._stats, self._reads.of(spans)
        tick.live_tokens = reads.tokens
        tick.prefill_tokens = step.prompt_tokens
        tick.decode_tokens = work.decode_rows + work.chunk_tokens - step.prompt_tokens
        tick.sampled = len(report.choices)
        tick.kv_bytes_read = reads.kv_bytes
        tick.blocks_touched = reads.blocks
        tick.shared_keys = report.figures.get("shared_keys", 0)
        seconds = report.seconds + tick.gc_ms / 1000
        stats.steps += 1
        stats.seconds += seconds
        stats.prefill_seconds += seconds if tick.prefill_tokens else 0.0
        stats.decode_seconds += seconds if tick.decode_tokens else 0.0
        stats.prompt_tokens += tick.prefill_tokens
        stats.generation_tokens += tick.sampled
        stats.peak_running = max(stats.peak_running, len(spans))
        record_memory(stats, reads)
        stats.decode_tokens += tick.decode_tokens
        stats.kv_bytes_read += tick.kv_bytes_read
        stats.blocks_touched += tick.blocks_touched
        stats.shared_keys += tick.shared_keys

    def _record_levels(self, tick: Tick) -> None:
        """Current levels, and how much the counters grew since the tick before."""
        stats, levels = self._stats, self._scheduler.levels()
        tick.running, tick.waiting = levels.running, levels.waiting
        tick.blocks_in_use, tick.blocks_cached = levels.blocks_in_use, levels.blocks_cached
        tick.preemptions = levels.preemptions - stats.preemptions
        tick.cow_clones = levels.cow_clones - stats.cow_clones
        tick.evictions = levels.evictions - stats.evictions
        tick.prefix_hit_tokens = levels.prefix_hit_tokens - stats.prefix_hit_tokens
        stats.blocks_in_use = levels.blocks_in_use
        stats.preemptions = levels.preemptions
        stats.cow_clones = levels.cow_clones
        stats.evictions = levels.evictions
        stats.prefix_hit_tokens = levels.prefix_hit_tokens
        for name, value in levels.reported.items():
            setattr(stats, name, value)
