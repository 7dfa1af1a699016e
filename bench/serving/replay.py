"""Drive one engine through one trace and note what comes out, and when."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from bench.serving.clocks import Clock
from bench.serving.meters import GcTimer, resident_bytes
from bench.serving.run import Run, Stream, Tick
from bench.serving.servers import Counters, Level, Server, Token
from bench.serving.sources import Source
from bench.serving.stall import Stall
from bench.serving.trace import Job


@dataclass(frozen=True)
class _StepTimes:
    """Of one step: seconds on the run's clock, and milliseconds behind its back."""

    start_s: float
    end_s: float
    gc_ms: float = 0.0
    stall_ms: float = 0.0
    off_cpu_ms: float = 0.0


class Replay:
    """One run under way; `run` holds what was measured so far, whenever it ends.

    Arrivals obey the source, not the engine. Requests are handed over between steps, but their
    latencies count from when they were due.

    Args:
        token_bytes: K/V of one token in one sequence.
        stall: injected into one tick.
        on_tokens: called with the number of tokens of each step.
    """

    def __init__(
        self,
        run: Run,
        server: Server,
        source: Source,
        clock: Clock,
        token_bytes: float,
        stall: Stall | None = None,
        on_tokens: Callable[[int], object] = lambda count: None,
    ) -> None:
        self.run = run
        self._server = server
        self._source = source
        self._clock = clock
        self._token_bytes = token_bytes
        self._stall = stall
        self._on_tokens = on_tokens
        self._open: list[int] = []  # by job: streams that have not ended
        self._level = server.level()
        self._counters = Counters()
        run.pool_bytes = server.pool_bytes

    def play(self) -> None:
        """Until every stream has ended; a KeyboardInterrupt leaves a partial run."""
        try:
            with GcTimer() as gc_timer:
                while self._server.has_work or not self._source.is_empty:
                    self._submit()
                    if self._server.has_work:
                        self._step(gc_timer)
                    else:
                        self._clock.wait_until(self._source.next_s())
        except BaseException:
            self.run.is_partial = True
            raise
        finally:
            self.run.counters = self._counters
            if not self._clock.is_virtual:
                for i, tick in enumerate(self.run.ticks):
                    tick.causes = self._server.causes(i)
            self.run.peak_mlx_bytes = int(mx.get_peak_memory())

    def _submit(self) -> None:
        for arrival_s, job in self._source.due(self._clock.now()):
            self._server.submit(job, self._add_streams(arrival_s, job))

    def _add_streams(self, arrival_s: float, job: Job) -> Sequence[int]:
        streams = self.run.streams
        first = len(streams)
        streams += [Stream(len(self._open), arrival_s) for _ in range(job.samples)]
        self._open.append(job.samples)
        return range(first, len(streams))

    def _step(self, gc_timer: GcTimer) -> None:
        start_s = self._clock.now()
        wall_s, cpu_s, gc_s = time.perf_counter(), time.process_time(), gc_timer.seconds
        stall_s = 0.0 if self._stall is None else self._stall.strike(len(self.run.ticks))
        tokens = self._server.step()
        self._clock.after_step()
        end_s = self._clock.now()
        off_cpu_s = time.perf_counter() - wall_s - (time.process_time() - cpu_s) - stall_s
        if self._clock.is_virtual:
            times = _StepTimes(start_s, end_s)
        else:
            gc_ms = 1000 * (gc_timer.seconds - gc_s)
            times = _StepTimes(start_s, end_s, gc_ms, 1000 * stall_s, 1000 * max(0.0, off_cpu_s))
        num_ended = self._take_in(tokens, end_s)
        self._note(times, tokens, num_ended, self._server.level(), self._server.counters())
        self._on_tokens(len(tokens))

    def _take_in(self, tokens: list[Token], now_s: float) -> int:
        """Returns how many streams ended."""
        num_ended = 0
        for token in tokens:
            stream = self.run.streams[token.stream]
            stream.times_s.append(now_s)
            stream.tokens.append(token.token)
            if token.is_last:
                stream.is_done = True
                num_ended += 1
                self._open[stream.job] -= 1
                if self._open[stream.job] == 0:
                    self._source.completed()
        return num_ended

    def _note(
        self,
        times: _StepTimes,
        tokens: list[Token],
        num_ended: int,
        level: Level,
        counters: Counters,
    ) -> None:
        before, done = self._level, self._counters
        preemptions = counters.preemptions - done.preemptions
        tick = Tick(
            start_s=times.start_s,
            tick_ms=1000 * (times.end_s - times.start_s),
            tokens=len(tokens),
            prompt_tokens=counters.prompt_tokens - done.prompt_tokens,
            running=level.running,
            waiting=level.waiting,
            joined=max(0, level.running + num_ended + preemptions - before.running),
            left=num_ended,
            held_bytes=level.held_bytes,
            live_bytes=level.live_tokens * self._token_bytes,
            grown_bytes=level.held_bytes - before.held_bytes if self.run.pool_bytes is None else 0,
            blocks_in_use=level.blocks_in_use,
            preemptions=preemptions,
            cow_clones=counters.cow_clones - done.cow_clones,
            gc_ms=times.gc_ms,
            stall_ms=times.stall_ms,
            off_cpu_ms=times.off_cpu_ms,
        )
        self.run.ticks.append(tick)
        self.run.peak_rss_bytes = max(self.run.peak_rss_bytes, resident_bytes())
        self._level, self._counters = level, counters
