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
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.attention.prewarm import prewarm
from mlx_paged.kv.block_manager import KVBlockManager
from mlx_paged.kv.layer_groups import plan_pool
from mlx_paged.kv.memory import hold_wired_limit, num_blocks_for
from mlx_paged.metrics.stats import Traces
from mlx_paged.outputs import describe
from mlx_paged.request import Request
from mlx_paged.runner.batch import Batch
from mlx_paged.runner.links import Kind, Link, LostRank, connect
from mlx_paged.runner.model_probe import ModelProfile, model_type, probe
from mlx_paged.runner.model_runner import LaunchedStep, ModelRunner
from mlx_paged.runner.plan import MirroredAllocator, PlanReader, PlanWriter
from mlx_paged.runner.skip_unsampled import attached_to
from mlx_paged.sampling.sampler import Sampled, Scores
from mlx_paged.scheduler.step import Step

ANSWER_S = 1.0  # for a server's answers to go out before the process ends
HEADS = "num_attention_heads num_key_value_heads linear_num_key_heads linear_num_value_heads"
"""Names that configurations of mlx-lm have for numbers of heads that ranks divide."""


def rank() -> int | None:
    """This process's rank under mlx.launch; None without it."""
    return int(text) if (text := os.environ.get("MLX_RANK", "")).isdecimal() else None


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


def why_whole(model: nn.Module, num_ranks: int) -> str | None:
    """Why a model cannot be divided among so many ranks; None: nothing is known."""
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
    """Rank 0's view of the others, which follow the newest engine. `listeners` are called with the
    error when a rank is lost, before the process ends."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.listeners: list[Callable[[LostRank], None]] = []
        self._ending = threading.Lock()  # taken when the process ends
        self._links = connect(group, lambda rank, reason: self.end(f"rank {rank} {reason}"))
        atexit.register(self._leave)

    @classmethod
    def of(cls, model: nn.Module) -> "Ranks | None":
        """Those of a model that :func:`joined` returned; None if this process is alone."""
        return attached_to(model, "ranks", lambda model: None)

    def send(self, kind: int, content: bytes = b"") -> None:
        for link in self._links:
            link.send(kind, content)

    def answers(self) -> list[Any]:
        return [json.loads(link.receive()[1]) for link in self._links]

    def agree(self, num_blocks: int, *options: Any) -> int:
        """The blocks for which every rank has memory; `options` as :func:`_follow` reads them."""
        self.send(Kind.MEASURE, json.dumps(options).encode())
        return int(min(num_blocks, *self.answers()))

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
        mx.synchronize()  # a step may be under way, which needs the others
        self._ending.acquire()
        for link in self._links:
            with suppress(LostRank):
                link.send(Kind.FAREWELL)


class _RankedRunner(ModelRunner):
    """A runner with a part of the model. Collective operations have the same order on all ranks:
    each forward is begun before the next one is built, from the same arrays."""

    group: mx.distributed.Group

    def _forward(self, batch: Batch) -> tuple[mx.array, Scores | None]:
        logits, scores = super()._forward(batch)
        computed = self.manager.pool.handles() + self.states.arrays(batch.seq_ids)
        self._begin(computed + [logits] * bool(batch.sampled))
        return logits, scores

    def _shared(self, before: LaunchedStep | None, tokens: mx.array | None) -> LaunchedStep:
        """A step as the one before the next, with its tokens from all ranks: rank 0 has them, the
        others have zeros. If another rank ends meanwhile, MLX's ring writes nothing into a sum of
        fewer numbers than ranks, and the embedding would read what is there."""
        assert before is not None
        rows = len(before.requests)
        tokens = mx.zeros(rows, mx.int32) if tokens is None else tokens
        tokens = mx.pad(tokens, (0, max(0, self.group.size() - rows)))
        tokens = mx.distributed.all_sum(tokens, group=self.group)[:rows]
        self._begin([tokens])
        return LaunchedStep(before.requests, Sampled(tokens, tokens, tokens))


class LeadingRunner(_RankedRunner):
    """Rank 0's: tells the others each step, then computes its own part; `stats`: what it told."""

    def __init__(self, ranks: Ranks, model: nn.Module, manager: Any, profile: ModelProfile) -> None:
        super().__init__(model, manager, profile)
        self.ranks, self.group = ranks, ranks.group
        self.stats: dict[str, Any] = {"count": self.group.size(), "plans": 0, "plan_bytes": 0}
        self.stats |= {"most_plan_bytes": 0, "plan_seconds": 0.0}
        self._writer = PlanWriter(manager.allocator)

    def compile_decodes(self, wanted: bool | None, max_rows: int) -> Traces | None:
        """As all runners, if `wanted`: no clock decides. The others make their pools meanwhile."""
        of = self.manager.allocator
        options = of.num_blocks, of.chunk, bool(wanted), max_rows, self.cpu_layers.linear
        self.ranks.send(Kind.MAKE, json.dumps(options).encode())
        traces = super().compile_decodes(bool(wanted), max_rows)
        answers = self.ranks.answers()
        if any(reason != self.why_plain for _, reason in answers):
            raise LostRank(f"decodes are compiled on some ranks only: {answers}, {self.why_plain}")
        self.stats["kv_pool_bytes"] = shares = [self.manager.pool.nbytes, *(a[0] for a in answers)]
        logging.info("bytes of K/V on each rank: %s", shares)
        return traces

    def _launch(self, step: Step, before: LaunchedStep | None) -> LaunchedStep:
        started = time.perf_counter()
        awaits = any(not span.request.tokens[span.start : span.stop] for span in step.spans)
        plan = self._writer.write(step, awaits)
        self.ranks.send(Kind.PLAN, plan)
        self.stats["plans"] += 1
        self.stats["plan_bytes"] += len(plan)
        self.stats["most_plan_bytes"] = max(self.stats["most_plan_bytes"], len(plan))
        self.stats["plan_seconds"] += time.perf_counter() - started
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

    def recover(self, error: BaseException | None = None) -> None:
        """End the process: nobody knows how much of the step the other ranks have computed. That
        one of them has closed its connection is noticed first."""
        time.sleep(ANSWER_S)
        self.ranks.end(f"a step failed ({error and describe(error)})")


class _FollowingRunner(_RankedRunner):
    """Another rank's: computes the steps that it is told, and samples nothing."""

    def __init__(self, group: Any, model: nn.Module, manager: Any, profile: ModelProfile) -> None:
        manager.allocator = mirrored = MirroredAllocator(manager.allocator)
        super().__init__(model, manager, profile)
        self.group, self._reader = group, PlanReader(mirrored)

    def follow(self, message: bytes, before: LaunchedStep | None) -> LaunchedStep:
        """Launch the step of a plan; then wait for the step before."""
        step, awaits, calls = self._reader.read(message)
        for request, child in calls:
            self.drop(request) if child is None else self.fork(request, child)
        launched = self._launch(step, self._shared(before, None) if awaits else None)
        if before is not None:
            self.collect(before)
        return launched

    def _sample(self, launched: LaunchedStep) -> bool:
        launched.unsampled = None
        return False


def _follow(
    model: nn.Module, group: mx.distributed.Group, link: Link, problem: str | None
) -> NoReturn:
    """Compute what rank 0 says until it ends. With a problem, wait until rank 0 has told it."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    runner: Any = None
    manager: Any = None
    before: LaunchedStep | None = None
    try:
        while (received := link.receive())[0] != Kind.FAREWELL:
            kind, content = received
            if problem is not None:  # of this rank alone
                raise ValueError(problem)
            if kind == Kind.PLAN:
                before = runner.follow(content, before)
            elif kind == Kind.MEASURE:
                before = runner = manager = None  # an engine before gives its memory back
                block_size, kv_bits, blocks, memory, snapshots = json.loads(content)
                profile = probe(model).quantized(kv_bits)
                shapes, windows, state_bytes = profile.shapes, profile.windows, profile.state_bytes
                plan = plan_pool(shapes, windows, block_size, one_group=profile.recurrent)
                blocks = blocks or num_blocks_for(plan, block_size, memory, snapshots * state_bytes)
                link.send(Kind.ANSWER, json.dumps(blocks).encode())
            else:
                blocks, chunk, compiles, max_rows, linear = json.loads(content)
                manager = KVBlockManager.planned(plan, block_size, blocks, chunk)
                runner = _FollowingRunner(group, model, manager, profile)
                runner.choose_linear(linear)
                runner.compile_decodes(compiles, max_rows)
                runner.warm_up()
                prewarm(profile.attentions, block_size, plan)
                hold_wired_limit(link)
                answer = manager.pool.nbytes, runner.why_plain
                link.send(Kind.ANSWER, json.dumps(answer).encode())
    except BaseException as error:
        traceback.print_exc()
        with suppress(LostRank):
            link.send(Kind.FAILURE, f"failed: {error}".encode())
        os._exit(1)
    os._exit(2 if problem else 0)  # MLX's threads may hang in a collective operation
