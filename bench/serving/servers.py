"""The engines as the harness drives them: mlx_paged's, mlx-lm's, and any in static batches."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from shutil import rmtree
from typing import Any
from weakref import finalize

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache

from bench.serving.trace import Job
from mlx_paged import Engine
from mlx_paged.kv.memory import default_kv_memory
from mlx_paged.metrics.tick import Tick as EngineTick

PREFILL_BATCH = 8  # mlx-lm's own default


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a stream; `is_last`: none will follow."""

    stream: int
    token: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Level:
    """What an engine holds between two steps."""

    running: int  # sequences that have K/V and are being computed
    waiting: int  # all other sequences
    held_bytes: int  # K/V memory that no other sequence could use now
    live_tokens: int  # of the running sequences, with K/V; shared ones count for each sequence
    blocks_in_use: int | None = None  # of a paged pool


@dataclass(frozen=True, slots=True)
class Counters:
    """What an engine has done since it was made; what it does not count is 0."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    cow_clones: int = 0
    peak_blocks_in_use: int = 0
    drafts: int = 0
    accepted_drafts: int = 0


class Server(ABC):
    """An engine, driven from one thread."""

    prompt_tokens = 0
    """Computed so far; for engines that count nothing else."""

    @property
    def pool_bytes(self) -> int | None:
        """K/V memory that is allocated up front; None: it grows."""
        return None

    @property
    @abstractmethod
    def has_work(self) -> bool: ...

    @abstractmethod
    def submit(self, job: Job, streams: Sequence[int]) -> None:
        """Queue a job; `streams` names its samples.

        Raises:
            ValueError: the engine could never hold it.
        """

    @abstractmethod
    def step(self) -> list[Token]:
        """Compute one step; returns the tokens that came out."""

    @abstractmethod
    def level(self) -> Level: ...

    def counters(self) -> Counters:
        return Counters(prompt_tokens=self.prompt_tokens)

    def causes(self, step: int) -> tuple[str, ...]:
        """What made a step long, in the engine's own words, likeliest first; asked at the end."""
        return ()


def with_kv_memory(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Options whose pool takes all that the device spares, unless they have a size: the numbers of
    a benchmark depend neither on other programs nor on how many sequences run together."""
    if options.keys() & {"kv_memory", "num_blocks", "max_kv_tokens"}:
        return options
    mx.eval(model.parameters())
    return {"kv_memory": default_kv_memory()} | options


class PagedServer(Server):
    """mlx_paged: continuous batching over a pool of blocks; `options` are the engine's."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.engine = Engine(model, **with_kv_memory(model, options))
        if "kv_disk" in options:  # a directory for this engine alone
            finalize(self, rmtree, options["kv_disk"], ignore_errors=True)
        self._streams: dict[int, int] = {}  # of requests under way, by request id
        self._ticks: list[EngineTick | None] = []  # one a step; None: it computed nothing

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
        blocks = scheduler.allocator.store.blocks_in_use
        return Level(
            running=len(scheduler.running),
            waiting=len(self._streams) - len(scheduler.running),
            held_bytes=blocks * self.engine.stats.block_bytes,
            live_tokens=sum(request.num_computed for request in scheduler.running.values()),
            blocks_in_use=blocks,
        )

    def counters(self) -> Counters:
        names = Counters.__dataclass_fields__
        return Counters(**{name: getattr(self.engine.stats, name) for name in names})

    def causes(self, step: int) -> tuple[str, ...]:
        tick = self._ticks[step]
        return () if tick is None else tick.causes


class BatchServer(Server):
    """mlx-lm's BatchGenerator: continuous batching; requests without a place wait in its queue."""

    def __init__(self, model: nn.Module, max_running: int, prefill_chunk: int) -> None:
        self._generator = BatchGenerator(
            model,
            completion_batch_size=max_running,
            prefill_batch_size=min(PREFILL_BATCH, max_running),
            prefill_step_size=prefill_chunk,
        )
        self._streams: dict[int, int] = {}  # of requests under way, by mlx-lm's id
        self._kv_tokens: dict[int, int] = {}  # of those that have a cache, by mlx-lm's id

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
            self.prompt_tokens += computed - self._kv_tokens.get(response.uid, 0)
            self._kv_tokens[response.uid] = computed
        return tokens

    def level(self) -> Level:
        return Level(
            running=len(self._kv_tokens),
            waiting=len(self._streams) - len(self._kv_tokens),
            held_bytes=int(self._generator.prompt_cache_nbytes),
            live_tokens=sum(self._kv_tokens.values()),
        )


class SequentialServer(Server):
    """mlx-lm's generate_step, one request after the other.

    The first step of a request computes its whole prompt, each further step one token.
    """

    def __init__(self, model: nn.Module, prefill_chunk: int) -> None:
        self._model = model
        self._prefill_chunk = prefill_chunk
        self._queue: deque[tuple[Job, int]] = deque()
        self._tokens: Iterator[Any] | None = None  # of the request under way
        self._cache: list[Any] = []
        self._stream = self._num_left = self._kv_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or self._tokens is not None

    def submit(self, job: Job, streams: Sequence[int]) -> None:
        self._queue.extend((job, stream) for stream in streams)

    def step(self) -> list[Token]:
        if self._tokens is None:
            self._tokens = self._begin(*self._queue.popleft())
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

    def _begin(self, job: Job, stream: int) -> Iterator[Any]:
        self._cache = make_prompt_cache(self._model)
        self._stream, self._num_left, self._kv_tokens = stream, job.max_tokens, len(job.prompt)
        self.prompt_tokens += len(job.prompt)
        tokens: Iterator[Any] = generate_step(
            mx.array(job.prompt),
            self._model,
            max_tokens=job.max_tokens,
            prompt_cache=self._cache,
            prefill_step_size=self._prefill_chunk,
        )
        return tokens


class StaticBatches(Server):
    """Any engine without top-up: requests wait until all of the last batch have ended.

    Args:
        batch_size: sequences in a batch at most; a job's samples stay together.
    """

    def __init__(self, server: Server, batch_size: int) -> None:
        self._server = server
        self._batch_size = batch_size
        self._queue: deque[tuple[Job, Sequence[int]]] = deque()

    @property
    def pool_bytes(self) -> int | None:
        return self._server.pool_bytes

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or self._server.has_work

    def submit(self, job: Job, streams: Sequence[int]) -> None:
        self._queue.append((job, streams))

    def step(self) -> list[Token]:
        if not self._server.has_work:
            self._begin_batch()
        return self._server.step()

    def level(self) -> Level:
        level = self._server.level()
        queued = sum(len(streams) for _, streams in self._queue)
        return replace(level, waiting=level.waiting + queued)

    def counters(self) -> Counters:
        return self._server.counters()

    def causes(self, step: int) -> tuple[str, ...]:
        return self._server.causes(step)

    def _begin_batch(self) -> None:
        room = self._batch_size
        while self._queue and (len(self._queue[0][1]) <= room or room == self._batch_size):
            job, streams = self._queue.popleft()
            self._server.submit(job, streams)
            room -= len(streams)
