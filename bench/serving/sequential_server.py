"""mlx-lm's generate_step under the harness: one request after the other."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from bench.serving.servers import Counters, Level, Token
from bench.serving.trace import Job


class SequentialServer:
    """A whole prompt is one step, and every token after it."""

    pool_bytes = None

    def __init__(self, model: nn.Module, prefill_chunk: int) -> None:
        self._model = model
        self._prefill_chunk = prefill_chunk
        self._queue: deque[tuple[Job, int]] = deque()
        self._tokens: Iterator[Any] | None = None  # of the request under way
        self._cache: list[Any] = []
        self._stream = self._num_left = self._kv_tokens = self._prompt_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or self._tokens is not None

    def submit(self, job: Job, streams: Sequence[int]) -> None:
        self._queue.extend((job, stream) for stream in streams)

    def step(self) -> list[Token]:
        if self._tokens is None:
            self._begin(*self._queue.popleft())
        assert self._tokens is not None
        token, _ = next(self._tokens)
        self._kv_tokens += 1
        self._num_left -= 1
        is_last = self._num_left == 0
        if is_last:
            self._tokens, self._cache, self._kv_tokens = None, [], 0
        return [Token(self._stream, int(token), is_last)]

    def level(self) -> Level:
        return Level(
            running=int(self._tokens is not None),
            waiting=len(self._queue),
            held_bytes=sum(cache.nbytes for cache in self._cache),
            live_tokens=self._kv_tokens,
        )

    def counters(self) -> Counters:
        return Counters(prompt_tokens=self._prompt_tokens)

    def causes(self, step: int) -> tuple[str, ...]:
        return ()

    def _begin(self, job: Job, stream: int) -> None:
        self._cache = make_prompt_cache(self._model)
        self._stream, self._num_left, self._kv_tokens = stream, job.max_tokens, len(job.prompt)
        self._prompt_tokens += len(job.prompt)
        self._tokens = generate_step(
            mx.array(job.prompt),
            self._model,
            max_tokens=job.max_tokens,
            prompt_cache=self._cache,
            prefill_step_size=self._prefill_chunk,
        )
