"""Drive one engine through one trace and record what comes out, and when."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing

import mlx.core as mx

from bench.flags.limits import Stall
from bench.serving.run import Run, Stream, Tick
from bench.serving.servers import Counters, Server, Token
from bench.serving.trace import Job
from bench.serving.workload import OpenLoop
from mlx_paged.metrics.recorder import GcPauses
from mlx_paged.metrics.stats import resident_bytes


class Clock:
    """Seconds since it was made: wall time.

    Attributes:
        is_virtual: it says nothing about how long anything took.
    """

    is_virtual = False

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self.now()))

    def after_step(self) -> None:
        """The engine has computed a step."""


class StepClock(Clock):
    """Every step takes `step_s`, so that no count depends on the speed of the machine."""

    is_virtual = True

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, time_s: float) -> None:
        self._now = max(self._now, time_s)

    def after_step(self) -> None:
        self._now += self._step_s


class Replay:
    """One run under way; `run` holds what was measured so far, whenever it ends.

    The source decides when requests arrive, not the engine. Requests are submitted between steps,
    but their latencies count from when they were due. `token_bytes` is the K/V of one token in one
    sequence; `on_tokens` is called with the number of tokens of each step.
    """

    def __init__(
        self,
        run: Run,
        server: Server,
        source: OpenLoop,
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
        """Run until every stream has ended; a KeyboardInterrupt leaves a partial run."""
        try:
            with closing(GcPauses(time.perf_counter)) as pauses:
                pauses.watch()
                while self._server.has_work or not self._source.is_empty:
                    for arrival_s, job in self._source.due(self._clock.now()):
                        self._server.submit(job, self._add_streams(arrival_s, job))
                    if self._server.has_work:
                        self._step(pauses)
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

    def _add_streams(self, arrival_s: float, job: Job) -> Sequence[int]:
        streams = self.run.streams
        first = len(streams)
        streams += [Stream(len(self._open), arrival_s) for _ in range(job.samples)]
        self._open.append(job.samples)
        return range(first, len(streams))

    def _step(self, pauses: GcPauses) -> None:
        start_s = self._clock.now()
        wall_s, cpu_s, gc_s = time.perf_counter(), time.process_time(), pauses.seconds
        stall_s = 0.0 if self._stall is None else self._stall.sleep(len(self.run.ticks))
        tokens = self._server.step()
        self._clock.after_step()
        end_s = self._clock.now()
        gc_s = pauses.seconds - gc_s
        off_cpu_s = time.perf_counter() - wall_s - (time.process_time() - cpu_s) - stall_s
        tick = self._tick(start_s, end_s, tokens)
        if not self._clock.is_virtual:
            tick.gc_ms, tick.stall_ms = 1000 * gc_s, 1000 * stall_s
            tick.off_cpu_ms = 1000 * max(0.0, off_cpu_s)
        self.run.ticks.append(tick)
        self.run.peak_rss_bytes = max(self.run.peak_rss_bytes, resident_bytes())
        self._on_tokens(len(tokens))

    def _give_out(self, tokens: list[Token], now_s: float) -> int:
        """Append tokens to their streams; returns how many streams ended."""
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

    def _tick(self, start_s: float, end_s: float, tokens: list[Token]) -> Tick:
        """The step that just ended, by what changed since the one before."""
        num_ended = self._give_out(tokens, end_s)
        before, self._level = self._level, self._server.level()
        done, self._counters = self._counters, self._server.counters()
        level, counters = self._level, self._counters
        preemptions = counters.preemptions - done.preemptions
        return Tick(
            start_s=start_s,
            tick_ms=1000 * (end_s - start_s),
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
        )
