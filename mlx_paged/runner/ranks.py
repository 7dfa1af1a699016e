"""One model on several processes under mlx.launch: each has a part of every layer and of its K/V.

Rank 0 schedules, samples and serves. The others compute the steps that it tells them.
"""

import atexit
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.attention.prewarm import prewarm
from mlx_paged.kv.block_manager import KVBlockManager
from mlx_paged.kv.layer_groups import plan_pool
from mlx_paged.kv.memory import hold_wired_limit, num_blocks_for
from mlx_paged.metrics.stats import RankStats, Traces
from mlx_paged.request import Request
from mlx_paged.runner.batch import Batch
from mlx_paged.runner.links import Kind, Link, LostRank, connect
from mlx_paged.runner.model_probe import ModelProfile, model_type, probe
from mlx_paged.runner.model_runner import LaunchedStep, ModelRunner
from mlx_paged.runner.plan import MirroredAllocator, PlanReader, PlanWriter
from mlx_paged.runner.skip_unsampled import attached_to
from mlx_paged.sampling.sampler import Sampled, Scores
from mlx_paged.scheduler.runner_protocol import SampledToken
from mlx_paged.scheduler.step import Step

RANK = "MLX_RANK"  # mlx.launch sets it
ANSWER_S = 1.0  # for a server's answers to go out before the process ends
FAILED, REFUSED = 1, 2
LOGGER = logging.getLogger(__name__)

HEADS = (
    *("num_attention_heads", "num_key_value_heads"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""Names that configurations of mlx-lm have for numbers of heads that ranks divide."""


def rank() -> int | None:
    """This process's rank under mlx.launch; None without it."""
    return int(os.environ[RANK]) if RANK in os.environ else None


def joined(model: nn.Module) -> nn.Module:
    """Under mlx.launch with several processes: divide a model, which every rank has loaded, among
    them. On rank 0 an engine of the model that is returned computes with all ranks. On the others
    this computes what rank 0 says until rank 0 ends, then raises SystemExit.

    Raises:
        ValueError: the model cannot be divided so, or the process has divided another one.
    """
    if rank() is None or (group := mx.distributed.init()).size() == 1:
        return model
    if Ranks.exist:
        raise ValueError("a run under mlx.launch has one model: expected no second one")
    Ranks.exist = True
    others = Ranks(group) if group.rank() == 0 else None
    link = None if others else connect(group, lambda *reason: os._exit(FAILED))[0]
    problem = _why_whole(model, group.size())
    try:
        if problem is None:
            model.shard(group)
            mx.eval(model.parameters())
    except Exception as error:
        problem = f"mlx-lm cannot divide it among {group.size()} ranks: {error}"
    if link is not None:
        _follow(model, group, link, problem)
    if problem is not None:
        raise ValueError(f"model type {model_type(model)}: {problem}")
    attached_to(model, "ranks", lambda model: others)
    return model


def _why_whole(model: nn.Module, num_ranks: int) -> str | None:
    """Why a model cannot be divided among so many ranks; None: nothing is known."""
    if not hasattr(model, "shard"):
        return "mlx-lm has no shard() for it, so it runs in one process only"
    args = getattr(getattr(model, "language_model", model), "args", None)
    counts = {name: getattr(args, name, None) for name in HEADS}
    if getattr(args, "kv_lora_rank", None):  # every rank has the whole latent
        del counts["num_key_value_heads"]
    known = {name: count for name, count in counts.items() if isinstance(count, int) and count}
    may_repeat = model_type(model).startswith("qwen3_5")

    def divides(number: int, name: str, count: int) -> bool:
        repeats = may_repeat and name == "num_key_value_heads" and number % count == 0
        return count % number == 0 or repeats

    def will_do(number: int) -> bool:
        return all(divides(number, *each) for each in known.items())

    if will_do(num_ranks):
        return None
    numbers = [str(n) for n in range(1, max(known.values()) + 1) if will_do(n)]
    sizes = ", ".join(f"{name} is {count}" for name, count in known.items())
    return f"{sizes}: {num_ranks} ranks cannot divide them; expected {' or '.join(numbers)}"


class Ranks:
    """Rank 0's view of the others.

    Attributes:
        listeners: called with the error when a rank is lost, before the process ends.
        newest: the runner that the others follow.
    """

    exist = False  # in this process

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.listeners: list[Callable[[LostRank], None]] = []
        self.newest: LeadingRunner | None = None
        self._ending = threading.Lock()  # taken when the process ends
        self._links = connect(group, self._lost)
        atexit.register(self._leave)

    @classmethod
    def of(cls, model: nn.Module) -> "Ranks | None":
        """Those of a model that :func:`joined` returned; None if this process is alone."""
        return attached_to(model, "ranks", lambda model: None)

    def send(self, kind: Kind, content: bytes = b"") -> None:
        for link in self._links:
            link.send(kind, content)

    def ask(self, **question: Any) -> list[int]:
        """The others' answers, in order of their ranks."""
        self.send(Kind.ASK, json.dumps(question).encode())
        return self.answers()

    def answers(self) -> list[int]:
        return [json.loads(link.receive()[1]) for link in self._links]

    def agree(self, num_blocks: int, **options: Any) -> int:
        """The number of blocks for which each rank has memory; `options` are those of an engine."""
        self.newest = None
        return min([num_blocks, *self.ask(**options)])

    def _lost(self, rank: int, reason: str) -> None:
        """End the process: a collective operation that waits for the rank never returns."""
        self._ending.acquire()
        error = LostRank(f"rank {rank} {reason}: every request ends, and so does this process")
        for listener in self.listeners:
            with suppress(Exception):
                listener(error)
        print(f"mlx_paged: error: {error}", file=sys.stderr, flush=True)
        time.sleep(ANSWER_S if self.listeners else 0.0)
        os._exit(FAILED)

    def _leave(self) -> None:
        self._ending.acquire()
        with suppress(LostRank):
            self.send(Kind.FAREWELL)


class _RankedRunner(ModelRunner):
    """A runner with a part of the model. Collective operations have the same order on all ranks:
    each forward is begun before the next one is built, from the same arrays."""

    def __init__(
        self, model: nn.Module, manager: KVBlockManager, profile: ModelProfile, group: Any
    ) -> None:
        super().__init__(model, manager, profile)
        self._group = group

    def _forward(self, batch: Batch) -> tuple[mx.array, Scores | None]:
        logits, scores = super()._forward(batch)
        computed = self.manager.pool.handles() + self.states.arrays(batch.seq_ids)
        self._begin(computed + [logits] * bool(batch.sampled))
        return logits, scores

    def _shared(self, before: LaunchedStep, tokens: mx.array) -> LaunchedStep:
        """A step as the one before the next, with its tokens from all ranks: rank 0 has them, the
        others have zeros."""
        tokens = mx.distributed.all_sum(tokens, group=self._group)
        self._begin([tokens])
        return LaunchedStep(before.requests, Sampled(tokens, tokens, tokens))


class LeadingRunner(_RankedRunner):
    """Rank 0's: tells the others each step, then computes its own part.

    Attributes:
        stats: what was told.
    """

    def __init__(
        self, model: nn.Module, manager: KVBlockManager, profile: ModelProfile, ranks: Ranks
    ) -> None:
        super().__init__(model, manager, profile, ranks.group)
        self.stats = RankStats(ranks.group.size())
        self.ranks = ranks
        self._writer = PlanWriter(manager.allocator)
        self._failure: BaseException | None = None

    def compile_decodes(self, wanted: bool | None, max_rows: int) -> Traces | None:
        """As all runners, but only if `wanted`: what takes less time is not the same everywhere.
        The others make their pools and compile meanwhile."""
        allocator = self.manager.allocator
        options = {"max_blocks": allocator.num_blocks, "chunk": allocator.chunk}
        options |= {"compile": bool(wanted), "max_rows": max_rows}
        self.ranks.send(Kind.ASK, json.dumps(options).encode())
        traces = super().compile_decodes(bool(wanted), max_rows)
        self.stats.kv_pool_bytes = [self.manager.pool.nbytes, *self.ranks.answers()]
        self.ranks.newest = self
        _log_share(0, self.manager)
        return traces

    def launch(self, step: Step, before: LaunchedStep | None) -> LaunchedStep:
        with self._noted():
            return super().launch(step, before)

    def collect(self, launched: LaunchedStep) -> list[SampledToken]:
        with self._noted():
            return super().collect(launched)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    def _launch(self, step: Step, before: LaunchedStep | None) -> LaunchedStep:
        if self.ranks.newest is not self:
            raise RuntimeError("a newer engine of the model has the ranks: expected to use that")
        started = time.perf_counter()
        awaits = any(not span.request.tokens[span.start : span.stop] for span in step.spans)
        plan = self._writer.write(step, awaits)
        self.ranks.send(Kind.PLAN, plan)
        self.stats.note(len(plan), time.perf_counter() - started)
        if awaits:
            assert before is not None and before.sampled is not None
            before = self._shared(before, before.sampled.tokens)
        return super()._launch(step, before)

    def drop(self, request: Request) -> None:
        self._writer.drop(request)
        super().drop(request)

    def fork(self, parent: Request, child: Request) -> None:
        self._writer.fork(parent, child)
        super().fork(parent, child)

    def recover(self) -> None:
        """Raises LostRank: nobody knows how much of the step the other ranks have computed. If one
        of them has ended, that is noticed meanwhile and ends this process."""
        time.sleep(ANSWER_S)
        raise LostRank("a step failed, and the ranks cannot go on") from self._failure


class _FollowingRunner(_RankedRunner):
    """Another rank's: computes the steps that it is told, and samples nothing."""

    def __init__(self, model: nn.Module, manager: KVBlockManager, *others: Any) -> None:
        allocator = manager.allocator
        sizes = allocator.num_blocks, allocator.block_size, allocator.groups, allocator.chunk
        manager.allocator = mirrored = MirroredAllocator(*sizes)
        super().__init__(model, manager, *others)
        self._reader = PlanReader(mirrored)

    def follow(self, message: bytes, before: LaunchedStep | None) -> LaunchedStep:
        """Launch the step of a plan; then wait for the step before."""
        plan = self._reader.read(message)
        for request, child in plan.calls:
            if child is None:
                self.drop(request)
            else:
                self.fork(request, child)
        shared = None
        if plan.awaits:
            assert before is not None
            shared = self._shared(before, mx.zeros(len(before.requests), mx.int32))
        launched = self._launch(plan.step, shared)
        if before is not None:
            self.collect(before)
        return launched

    def _sample(self, launched: LaunchedStep) -> bool:
        launched.unsampled = None
        return False


@dataclass(slots=True)
class _Follower:
    """What a rank above 0 has made so far."""

    model: nn.Module
    group: mx.distributed.Group
    profile: ModelProfile | None = None
    block_size: int = 0
    runner: _FollowingRunner | None = None

    def answer(self, question: dict[str, Any]) -> int:
        """The blocks for which there is memory; or, when the pool is made, its bytes."""
        return self._make(**question) if "max_blocks" in question else self._measure(**question)

    def _measure(
        self,
        block_size: int,
        kv_bits: int | str | None,
        given_blocks: int | None,
        kv_memory: int | None,
        most_snapshots: int,
    ) -> int:
        self.runner, self.block_size = None, block_size  # the memory of the engine before is free
        self.profile = profile = probe(self.model).quantized(kv_bits)
        plan = plan_pool(profile.shapes, profile.windows, block_size, one_group=profile.recurrent)
        reserved = most_snapshots * profile.state_bytes
        return given_blocks or num_blocks_for(plan, block_size, kv_memory, reserved)

    def _make(self, max_blocks: int, chunk: int, compile: bool, max_rows: int) -> int:
        profile = self.profile
        assert profile is not None
        size = self.block_size
        plan = plan_pool(profile.shapes, profile.windows, size, one_group=profile.recurrent)
        manager = KVBlockManager.planned(plan, size, max_blocks, chunk)
        self.runner = _FollowingRunner(self.model, manager, profile, self.group)
        self.runner.compile_decodes(compile, max_rows)
        self.runner.warm_up()
        prewarm(profile.attentions, size, plan)
        hold_wired_limit(self)
        _log_share(self.group.rank(), manager)
        return manager.pool.nbytes


def _follow(
    model: nn.Module, group: mx.distributed.Group, link: Link, problem: str | None
) -> NoReturn:
    """Compute what rank 0 says until it ends. With a problem, wait until rank 0 has told it."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    follower, before = _Follower(model, group), None
    try:
        while (received := link.receive())[0] is not Kind.FAREWELL:
            kind, content = received
            if kind is Kind.PLAN:
                assert follower.runner is not None
                before = follower.runner.follow(content, before)
            else:
                before = None
                answer = follower.answer(json.loads(content))
                link.send(Kind.REPLY, json.dumps(answer).encode())
    except BaseException as error:
        traceback.print_exc()
        with suppress(LostRank):
            link.send(Kind.FAILURE, f"failed: {error}".encode())
        os._exit(FAILED)
    raise SystemExit(REFUSED if problem else 0)


def _log_share(rank: int, manager: KVBlockManager) -> None:
    megabytes = manager.pool.nbytes / 1e6
    LOGGER.info("rank %s: %s blocks, %.1f MB of K/V", rank, manager.pool.num_blocks, megabytes)
