"""mlx_paged's engine under the harness."""

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn

from bench.serving.servers import Counters, Level, Token
from bench.serving.trace import Job
from mlx_paged import Engine
from mlx_paged.tick import Tick


class PagedServer:
    """Continuous batching over a pool of blocks; `options` are the engine's."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.engine = Engine(model, **options)
        self._streams: dict[int, int] = {}  # of requests under way, by request id
        self._ticks: list[Tick | None] = []  # one a step; None: it computed nothing

    @property
    def pool_bytes(self) -> int:
        return self.engine.stats.num_blocks * self.engine.stats.block_bytes

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def submit(self, job: Job, streams: Sequence[int]) -> None:
        ids = self.engine.add_samples(list(job.prompt), job.samples, max_tokens=job.max_tokens)
        self._streams |= zip(ids, streams, strict=True)

    def step(self) -> list[Token]:
        log = self.engine.ticks
        num_ticks = log.num_ticks
        outputs = self.engine.step()
        self._ticks.append(log[-1] if log.num_ticks > num_ticks else None)
        tokens = []
        for output in outputs:
            if output.completion is not None and output.completion.error is not None:
                raise RuntimeError(f"[mlx_paged] a request failed: {output.completion.error}")
            assert output.token is not None
            is_last = output.completion is not None
            tokens.append(Token(self._streams[output.request_id], output.token, is_last))
            if is_last:
                del self._streams[output.request_id]
        return tokens

    def level(self) -> Level:
        scheduler = self.engine.scheduler
        blocks = scheduler.allocator.blocks_in_use
        return Level(
            running=len(scheduler.running),
            waiting=len(self._streams) - len(scheduler.running),
            held_bytes=blocks * self.engine.stats.block_bytes,
            live_tokens=sum(request.num_computed for request in scheduler.running.values()),
            blocks_in_use=blocks,
        )

    def counters(self) -> Counters:
        stats = self.engine.stats
        return Counters(
            prompt_tokens=stats.prompt_tokens,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            preemptions=stats.preemptions,
            cow_clones=stats.cow_clones,
            peak_blocks_in_use=stats.peak_blocks_in_use,
        )

    def causes(self, step: int) -> tuple[str, ...]:
        tick = self._ticks[step]
        return () if tick is None else tick.causes
