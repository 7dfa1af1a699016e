"""Engines side by side on one trace, round after round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.nn as nn

from bench.serving.clocks import Clock
from bench.serving.engines import Limits, kv_token_bytes, make_server, static_blocks
from bench.serving.meters import start_afresh
from bench.serving.replay import Replay
from bench.serving.run import Run
from bench.serving.sources import Source
from bench.serving.stall import Stall
from bench.serving.trace import Job, Trace

WARM_UP = (Job(0.0, (1, 2, 3, 4), 3), Job(0.0, (1, 2, 3, 4, 5), 3))


@dataclass
class Session:
    """All runs of a comparison; those that ended are in `runs`, and the one that was interrupted.

    Args:
        make_source: who sends a trace's jobs.
        make_clock: the time of a run, which begins with it.
        on_tokens: called with the number of tokens of each step.
    """

    model: nn.Module
    limits: Limits
    make_source: Callable[[Trace], Source]
    make_clock: Callable[[], Clock]
    stall: Stall | None = None
    on_tokens: Callable[[int], object] = lambda count: None
    runs: dict[str, list[Run]] = field(default_factory=dict)
    _token_bytes: float = 0.0

    def warm_up(self, engines: Sequence[str]) -> None:
        """Let every engine touch its code and the weights once."""
        self._token_bytes = kv_token_bytes(self.model)
        for name in engines:
            server = make_server(name, self.model, self.limits)
            for i, job in enumerate(WARM_UP):
                server.submit(job, [i])
            while server.has_work:
                server.step()

    def compare(
        self,
        engines: Sequence[str],
        trace: Trace,
        rounds: int,
        on_run: Callable[[str], object] = lambda name: None,
    ) -> None:
        """Engines take turns; each round begins with another one."""
        for i in range(rounds):
            first = i % len(engines)
            for name in [*engines[first:], *engines[:first]]:
                on_run(name)
                self.play(name, trace, self.make_source(trace))

    def play(self, name: str, trace: Trace, source: Source, *, keep: bool = True) -> Run:
        """One engine, made anew, through the trace once.

        Args:
            keep: list the run in `runs`.
        """
        start_afresh()
        limits = self.limits
        run = Run(
            name,
            static_blocks=static_blocks(trace, limits.max_running, limits.block_size),
            block_bytes=self._token_bytes * limits.block_size,
        )
        server = make_server(name, self.model, limits)
        if keep:
            self.runs.setdefault(name, []).append(run)
        clock = self.make_clock()
        Replay(run, server, source, clock, self._token_bytes, self.stall, self.on_tokens).play()
        return run
