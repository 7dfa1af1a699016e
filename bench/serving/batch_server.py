"""mlx-lm's BatchGenerator under the harness."""

from collections.abc import Sequence

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator

from bench.serving.servers import Counters, Level, Token
from bench.serving.trace import Job

PREFILL_BATCH = 8
"""mlx-lm's own default."""


class BatchServer:
    """Continuous batching as mlx-lm does it; requests that have no place wait in its own queue.

    Args:
        max_running: its completion batch size.
        prefill_chunk: its prefill step size.
    """

    pool_bytes = None

    def __init__(self, model: nn.Module, max_running: int, prefill_chunk: int) -> None:
        self._generator = BatchGenerator(
            model,
            completion_batch_size=max_running,
            prefill_batch_size=min(PREFILL_BATCH, max_running),
            prefill_step_size=prefill_chunk,
        )
        self._streams: dict[int, int] = {}  # of requests under way, by mlx-lm's id
        self._kv_tokens: dict[int, int] = {}  # of those that have a cache, by mlx-lm's id
        self._prompt_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._streams)

    def submit(self, job: Job, streams: Sequence[int]) -> None:
        prompts = [list(job.prompt) for _ in streams]
        ids = self._generator.insert(prompts, [job.max_tokens] * len(streams))
        self._streams |= zip(ids, streams, strict=True)

    def step(self) -> list[Token]:
        prompts, responses = self._generator.next()
        tokens = []
        for response in responses:
            is_last = response.finish_reason is not None
            tokens.append(Token(self._streams[response.uid], int(response.token), is_last))
            if is_last:
                del self._streams[response.uid], self._kv_tokens[response.uid]
            else:
                self._kv_tokens[response.uid] += 1
        for response in prompts:
            computed, _ = response.progress
            self._prompt_tokens += computed - self._kv_tokens.get(response.uid, 0)
            self._kv_tokens[response.uid] = computed
        return tokens

    def level(self) -> Level:
        return Level(
            running=len(self._kv_tokens),
            waiting=len(self._streams) - len(self._kv_tokens),
            held_bytes=int(self._generator.prompt_cache_nbytes),
            live_tokens=sum(self._kv_tokens.values()),
        )

    def counters(self) -> Counters:
        return Counters(prompt_tokens=self._prompt_tokens)

    def causes(self, step: int) -> tuple[str, ...]:
        return ()
