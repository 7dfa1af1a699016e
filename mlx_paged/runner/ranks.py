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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.arguments import require
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.launched import rank
from mlx_paged.ops.cpu_layers import CPULayers
from mlx_paged.options import OF_ONE_PROCESS, PoolConfig
from mlx_paged.outputs import describe
from mlx_paged.runner.launched_step import LaunchedStep
from mlx_paged.runner.layer_cuts import noting_cuts
from mlx_paged.runner.links import Kind, Link, LostRank, connect
from mlx_paged.runner.model_probe import model_type
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.runner.placed_terms import Mirror, TermSource, variants_of
from mlx_paged.runner.plan import VERSION, MirroredAllocator, PlanReader, PlanWriter
from mlx_paged.runner.pooled_model import MeasuredModel, PooledModel, probed
from mlx_paged.runner.processes import Computing, join
from mlx_paged.sampling.sampler import PendingTokens, Sampled, Sampler
from mlx_paged.scheduler.step import Runner, SampledToken, Step

LOGGER = logging.getLogger(__name__)

ANSWER_S = 1.0  # for a server's answers to go out before the process ends
HEADS = "num_attention_heads num_key_value_heads linear_num_key_heads linear_num_value_heads"
"""Names that configurations of mlx-lm have for numbers of heads that ranks divide."""


def joined(model: nn.Module) -> nn.Module:
    """Under mlx.launch with several processes: divide a model, which every rank has loaded, among
    them. On rank 0 an engine of the model that is returned computes with all ranks. On the others
    this computes what rank 0 says until rank 0 ends, then ends the process. Call it once. Raises
    ValueError if the model cannot be divided so, or if the ranks are not connected."""
    try:
        if rank() is None or (group := mx.distributed.init()).size() == 1:
            return model
    except RuntimeError as error:
        raise ValueError(f"mlx.launch's ranks do not find each other: {error}") from error
    others = Ranks(group) if group.rank() == 0 else None
    link = None if others else connect(group, lambda *reason: os._exit(1))[0]
    problem = why_whole(model, group.size())
    try:
        if problem is None:
            with noting_cuts(model, group):
                model.shard(group)
            mx.eval(model.parameters())
    except Exception as error:
        problem = f"mlx-lm cannot divide it among {group.size()} ranks: {error}"
    if link is not None:
        _follow(model, group, link, problem)
    if problem is not None:
        raise ValueError(f"model type {model_type(model)}: {problem}")
    if others is not None:
        join(model, others)
    return model


def why_whole(model: nn.Module, num_ranks: int) -> str | None:
    """Why a model cannot be divided among so many ranks; None: nothing is known."""
    if type(model).__module__.startswith("mlx_vlm."):
        return "models of mlx-vlm run in one process only"
    if not hasattr(model, "shard"):
        return "mlx-lm has no shard() for it, so it runs in one process only"
    args = getattr(getattr(model, "language_model", model), "args", None)
    counts = {name: getattr(args, name, None) or 0 for name in HEADS.split()}
    kv_heads = counts["num_key_value_heads"]
    if getattr(args, "kv_lora_rank", None):  # every rank has the whole latent
        counts["num_key_value_heads"] = 0

    def will_do(number: int) -> bool:
        left = {name for name, count in counts.items() if count % number}
        if model_type(model).startswith("qwen3_5") and number % kv_heads == 0:
            left.discard("num_key_value_heads")  # mlx-lm repeats them
        return not left

    if will_do(num_ranks):
        return None
    numbers = [str(n) for n in range(1, max(counts.values()) + 1) if will_do(n)]
    sizes = ", ".join(f"{name} is {count}" for name, count in counts.items() if count)
    return f"{sizes}: {num_ranks} ranks cannot divide them; expected {' or '.join(numbers)}"


class Ranks:
    """Rank 0's view of the others, which follow the newest engine: the :class:`Processes` of their
    model."""

    is_alone = False

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.listeners: list[Callable[[Any], None]] = []
        self._ending = threading.Lock()  # taken when the process ends
        self._links = connect(group, lambda rank, reason: self.end(f"rank {rank} {reason}"))
        atexit.register(self._leave)

    def check(self, config: PoolConfig) -> None:
        for name in OF_ONE_PROCESS:
            value = getattr(config, name, None)
            require(value is None, "Engine", name, value, "None on ranks")

    def send(self, kind: int, content: bytes = b"") -> None:
        for link in self._links:
            link.send(kind, content)

    def send_each(self, kind: int, content_of: Callable[[int], bytes]) -> None:
        """Send each rank its own content."""
        for number, link in enumerate(self._links, start=1):
            link.send(kind, content_of(number))

    def answers(self) -> list[Any]:
        return [json.loads(link.receive()[1]) for link in self._links]

    def pooled(
        self,
        measured: MeasuredModel,
        make_runner: Callable[..., ModelRunner] = ModelRunner,
        source: TermSource | None = None,
    ) -> Computing:
        """A model on the pools of all ranks, and the runner that leads them.

        Every rank takes rank 0's number of states to keep and its choice of linear layers. The rank
        with the least memory decides the number of blocks. Decodes are compiled only if the caller
        asks for it: no clock decides."""
        given = measured.config
        config = given.of_pool(
            adapters=None if given.adapters is None else {},  # their folders are rank 0's
            compile=bool(given.compile),
            cpu_linear=CPULayers(measured.model, given.cpu_linear).linear,
        )
        config = measured.states.decided(config)
        self.send(Kind.MEASURE, first_frame(config))
        num_blocks = int(min(measured.num_blocks, *self.answers()))
        self.send(Kind.MAKE, json.dumps(num_blocks).encode())
        measured = replace(measured, config=config, num_blocks=num_blocks)
        make_runner = partial(make_runner, begins_each=True)
        pooled = PooledModel(measured, make_runner, is_alone=False)
        answers = self.answers()
        if any(way != pooled.way for _, way in answers):
            raise LostRank(f"the ranks compute steps in several ways: {answers}, {pooled.way}")
        shares = [pooled.pool.nbytes, *(num_bytes for num_bytes, _ in answers)]
        LOGGER.info("bytes of K/V on each rank: %s", shares)
        pooled.runner.row_terms = None if source is None else source.terms
        runner = LeadingRunner(self, pooled.runner, shares, source)
        return Computing(pooled, runner, {"ranks": runner.stats})

    def end(self, reason: str) -> NoReturn:
        """End the process: a collective operation that waits for a rank may never return."""
        self._ending.acquire()
        error = LostRank(f"{reason}: every request ends, and so does this process")
        try:
            listeners = list(self.listeners)
            for listener in listeners:
                with suppress(Exception):
                    listener(error)
            print(f"mlx_paged: error: {error}", file=sys.stderr, flush=True)
            threading.Thread(target=sys.stdout.flush, daemon=True).start()  # a pipe may be full
            time.sleep(ANSWER_S if listeners else 0.1)
        finally:  # also if nobody reads the error, or the interpreter starts no more threads
            os._exit(1)

    def _leave(self) -> None:
        try:
            mx.synchronize()  # a step may be under way, which needs the others
        finally:
            self._ending.acquire()
            for link in self._links:
                with suppress(LostRank):
                    link.send(Kind.FAREWELL)


def _shared(
    before: LaunchedStep | None, tokens: mx.array | None, group: mx.distributed.Group
) -> LaunchedStep:
    """A step as the one before the next, with its tokens from all ranks: rank 0 has them, the
    others have zeros. If another rank ends meanwhile, MLX's ring writes nothing into a sum of fewer
    numbers than ranks, and the embedding would read what is there."""
    assert before is not None
    rows = len(before.requests)
    tokens = mx.zeros(rows, mx.int32) if tokens is None else tokens
    tokens = mx.pad(tokens, (0, max(0, group.size() - rows)))
    tokens = mx.distributed.all_sum(tokens, group=group)[:rows]
    mx.async_eval(tokens)  # type: ignore[no-untyped-call]
    coming = PendingTokens(before.requests, tokens)
    sampled = Sampled(tokens, tokens, tokens)
    return LaunchedStep(before.report, before.requests, sampled, coming=coming)


def first_frame(config: PoolConfig) -> bytes:
    """The first frame that rank 0 sends for an engine: the version of the frames and the engine's
    configuration."""
    return json.dumps({"version": VERSION, "config": asdict(config)}).encode()


def read_first_frame(content: bytes) -> PoolConfig:
    """The configuration of :func:`first_frame`. Raises ValueError if the frame has another version:
    the frames that follow would be misread."""
    found = json.loads(content)
    version = found.get("version", 1)  # the first version named none
    if version != VERSION:
        raise ValueError(
            f"rank 0 sends frames of version {version}, this rank reads version {VERSION}: expected"
            " the same version of mlx-paged on all ranks"
        )
    return PoolConfig(**found["config"])


class LeadingRunner(Runner[LaunchedStep]):
    """Rank 0's: tells the others each step, then lets `runner` compute its own part.

    Args:
        shares: bytes of K/V on each rank.
        source: of what rows add.

    Attributes:
        stats: of what it told.
    """

    def __init__(
        self,
        ranks: Ranks,
        runner: ModelRunner,
        shares: list[int],
        source: TermSource | None = None,
    ) -> None:
        self.ranks, self.runner, self._source = ranks, runner, source
        self.stats: dict[str, Any] = {"count": ranks.group.size(), "plans": 0, "plan_bytes": 0}
        self.stats |= {"most_plan_bytes": 0, "plan_seconds": 0.0, "kv_pool_bytes": shares}
        self._writer = PlanWriter(runner.allocator)
        self._released: list[int] = []  # states of which the others are told with the next plan
        self._rested: list[int] = []
        self._error: BaseException | None = None  # of a launch: the others wait for that step
        self._untold: BaseException | None = None  # of a launch of which the others do not know

    def launch(self, step: Step, before: LaunchedStep | None) -> LaunchedStep:
        self._bring_factors(step, before)
        started = time.perf_counter()
        awaits = any(not span.known for span in step.spans)
        plan = self._writer.write(step, awaits, self._released, self._rested)
        self._released, self._rested = [], []
        self.ranks.send(Kind.PLAN, plan)
        self.stats["plans"] += 1
        self.stats["plan_bytes"] += len(plan)
        self.stats["most_plan_bytes"] = max(self.stats["most_plan_bytes"], len(plan))
        self.stats["plan_seconds"] += time.perf_counter() - started
        try:
            if before is not None:  # the others go on with it, too, when they have the plan
                self.runner.go_on(before)
            if awaits:
                assert before is not None and before.sampled is not None
                before = _shared(before, before.sampled.tokens, self.ranks.group)
            return self.runner.launch(step, before)
        except BaseException as error:
            self._error = error
            raise

    def _bring_factors(self, step: Step, before: LaunchedStep | None) -> None:
        """Put what the rows of a step add and is not in memory there, on all ranks. They have it
        from rank 0 alone, so that no file of theirs can be another one."""
        source = self._source
        wanted = {} if source is None else variants_of(span.request for span in step.spans)
        if source is None or not wanted:
            return
        try:
            missing = source.read_missing(wanted)
        except BaseException as error:
            self._untold = error
            raise
        if not missing:
            return
        try:
            self.ranks.send(Kind.SETTLE)  # first: the step under way has sums of all ranks
            if before is not None:
                self.runner.go_on(before)
            mx.synchronize()
            for put in source.put_missing(missing, wanted):
                self.ranks.send_each(Kind.FACTORS, partial(put.content, source.places))
        except BaseException as error:
            self._error = error
            raise

    def transfer(
        self, stores: Sequence[BlockTransfer], loads: Sequence[BlockTransfer]
    ) -> Callable[[], None] | None:
        return self.runner.transfer(stores, loads)

    def collect(self, launched: LaunchedStep) -> list[SampledToken]:
        """The tokens of a step that all ranks have computed. If a rank fails, all are wrong."""
        if self._error is not None:
            raise self._error
        self.ranks.send(Kind.COLLECT)
        tokens = self.runner.collect(launched)
        self.ranks.answers()
        return tokens

    def release(self, state_ids: Sequence[int], rested: Sequence[int] = ()) -> None:
        self._released += state_ids
        self._rested += rested
        self.runner.release(state_ids, rested)

    def recover(self, error: BaseException | None = None) -> None:
        """End the process: nobody knows how much of the step the other ranks have computed. That
        one of them has closed its connection is noticed first. After a step of which no rank knows
        all of them begin again."""
        untold, self._untold = self._untold, None
        if error is not None and error is untold:
            self.ranks.send(Kind.RECOVER)
            self._released, self._rested = [], []
            return self.runner.recover(error)
        time.sleep(ANSWER_S)
        self.ranks.end(f"a step failed ({error and describe(error)})")


class _NoSampler(Sampler):
    """Another rank's: chooses no token, because rank 0 does."""

    def __call__(self, *args: Any, **options: Any) -> None:
        return None


class _Follower:
    """Another rank's: computes the steps of rank 0's plans.

    Attributes:
        mirror: what rows add, if they may add anything.
    """

    def __init__(self, measured: MeasuredModel, group: mx.distributed.Group) -> None:
        make_runner = partial(ModelRunner, begins_each=True, make_sampler=_NoSampler)
        self.pooled = PooledModel(measured, make_runner, _mirrored, is_alone=False)
        self._group = group
        if measured.config.adapters is not None:
            self.mirror = Mirror(measured.model)
            self.pooled.runner.row_terms = self.mirror.terms
        self._reader = PlanReader(cast(MirroredAllocator, self.pooled.allocator))
        self._before: LaunchedStep | None = None
        self._under_way: deque[LaunchedStep] = deque()

    def follow(self, message: bytes) -> None:
        """Launch the step of a plan."""
        runner, before = self.pooled.runner, self._before
        step, awaits = self._reader.read(message)
        if before is not None:  # as rank 0 does, before the tokens are shared
            runner.go_on(before)
        self._before = runner.launch(step, _shared(before, None, self._group) if awaits else None)
        self._under_way.append(self._before)

    def collect(self) -> None:
        """Wait for the oldest step under way."""
        self.pooled.runner.collect(self._under_way.popleft())

    def settle(self) -> None:
        """Wait for what is under way."""
        if self._before is not None:
            self.pooled.runner.go_on(self._before)
        mx.synchronize()

    def recover(self) -> None:
        """Begin again; all steps have ended."""
        self._before = None
        self._under_way.clear()
        self.pooled.runner.recover()


def _mirrored(*args: Any) -> MirroredAllocator:
    return MirroredAllocator(BlockAllocator(*args))


def _follow(
    model: nn.Module, group: mx.distributed.Group, link: Link, problem: str | None
) -> NoReturn:
    """Compute what rank 0 says until it ends. With a problem, wait until rank 0 has told it."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    follower: _Follower | None = None
    try:
        while (received := link.receive())[0] != Kind.FAREWELL:
            kind, content = received
            if problem is not None:  # of this rank alone
                raise ValueError(problem)
            if kind == Kind.PLAN:
                assert follower is not None
                follower.follow(content)
            elif kind == Kind.COLLECT:
                assert follower is not None
                follower.collect()
                link.send(Kind.ANSWER, b"null")
            elif kind == Kind.FACTORS:
                assert follower is not None
                follower.mirror.put(content)
            elif kind == Kind.SETTLE:
                assert follower is not None
                follower.settle()
            elif kind == Kind.RECOVER:
                assert follower is not None
                follower.recover()
            elif kind == Kind.MEASURE:
                follower = None  # an engine before gives its memory back
                config = read_first_frame(content)
                profile = probed(model, config)
                measured = MeasuredModel.of(model, profile, config, compiles=True)
                link.send(Kind.ANSWER, json.dumps(measured.num_blocks).encode())
            else:
                measured = replace(measured, num_blocks=json.loads(content))
                follower = _Follower(measured, group)
                pooled = follower.pooled
                pooled.warm_up()
                answer = pooled.pool.nbytes, pooled.way
                link.send(Kind.ANSWER, json.dumps(answer).encode())
                del pooled
    except BaseException as error:
        traceback.print_exc()
        with suppress(LostRank):
            link.send(Kind.FAILURE, f"failed: {error}".encode())
        os._exit(1)
    os._exit(2 if problem else 0)  # MLX's threads may hang in a collective operation
