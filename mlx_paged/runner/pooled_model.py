"""One model on one pool: an engine, a model that it has beside and each rank hold one of these."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_paged import ops
from mlx_paged.attention.paths import LONG_CHUNK, max_paged_queries
from mlx_paged.attention.prewarm import prewarm
from mlx_paged.attention.shared_prefixes import no_prefixes
from mlx_paged.holdings import CountedBy, Holding
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.kv.default_pool import Beside, Needs, default_blocks
from mlx_paged.kv.eviction import WorthOrder
from mlx_paged.kv.in_place import are_written_in_place
from mlx_paged.kv.layer_groups import PoolPlan
from mlx_paged.kv.limits import HeldLimits, is_wired
from mlx_paged.kv.memory import (
    MemoryBudget,
    default_cache_limit,
    gpu_memory,
    memory_in_use,
    most_blocks,
    num_blocks_for,
    promise,
    working_set,
)
from mlx_paged.kv.pool import KVPool, planned_block_bytes
from mlx_paged.kv.pool_holdings import pool_holdings
from mlx_paged.kv.worth import TextWorth
from mlx_paged.options import PoolConfig
from mlx_paged.request import Request
from mlx_paged.runner.hosted_model import HostedModel
from mlx_paged.runner.layer_operations import text_work
from mlx_paged.runner.layer_states import StateMemory
from mlx_paged.runner.layer_work import command_bound
from mlx_paged.runner.model_probe import Batching, ModelProfile, probe
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.runner.positions import positions_of
from mlx_paged.runner.skip_unsampled import lock_of
from mlx_paged.runner.step_memory import step_bytes
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.budget import longest_chunk
from mlx_paged.scheduler.step import Span, Step

NOBODY = -1  # id of a request that no caller made


def probed(model: nn.Module, config: PoolConfig | None = None) -> ModelProfile:
    """What a model stores, as the options say; None: as the model computes it. The weights of the
    model are in memory afterwards.

    Raises:
        UnsupportedModelError: results for this model could be wrong.
        ValueError: its K/V cannot be stored so.
    """
    with lock_of(model):
        mx.eval(model.state)  # only the thread that made an array can compute it
        profile = probe(model)
        return profile if config is None else profile.stored_by(config)


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model and the pool for which this process has memory."""

    model: nn.Module
    config: PoolConfig
    profile: ModelProfile
    plan: PoolPlan
    states: StateMemory
    num_blocks: int  # of the pool; `plan.width` of them hold a block of all layers
    bound: str  # of the pool
    has_compiled: bool = False  # whether the GPU's pipelines are there
    kernel_seconds: float | None = None  # that this took

    @classmethod
    def of(
        cls,
        model: nn.Module,
        profile: ModelProfile,
        config: PoolConfig,
        beside: ModelProfile | None = None,
        compiles: bool = False,
    ) -> "MeasuredModel":
        """Measure the memory. A model `beside` this one gets a part of it.

        Args:
            compiles: ask the GPU's compiler for all pipelines first, because where it refuses one,
                plain MLX takes more memory.

        Raises:
            ValueError: there is no room for a request, or the device cannot hold `kv_memory`.
        """
        seconds = _compiled([profile] if beside is None else [profile, beside], config, compiles)
        block_size = config.block_size
        # Plain MLX would copy an array at each layer but the first one that writes it in a step.
        plan = profile.pool_plan(
            block_size, shares=are_written_in_place(profile.shapes, block_size)
        )
        states = profile.states.planned(config)
        own, share, kv_memory = planned_block_bytes(plan.arrays), 1.0, config.kv_memory
        if beside is not None:
            share = _share(profile, beside)
        if config.num_blocks is not None:
            num_blocks, bound = config.num_blocks * plan.width, "num_blocks"
        elif kv_memory is not None or own == 0:
            kv_memory = None if kv_memory is None else int(kv_memory * share)
            num_blocks = num_blocks_for(plan, block_size, kv_memory, states.num_bytes)
            bound = "no memory" if kv_memory is None else "kv_memory"
        else:
            kept = states.num_bytes + _adapter_bytes(config)
            step = _step_bytes(model, profile, config, _computes_plainly(profile))
            others = _beside(step, config, kept)
            needs = _needs(model, plan, config)
            num_blocks, bound = default_blocks(int(own / share), needs, others)
            num_blocks = min(num_blocks, most_blocks(plan, block_size))
        return cls(model, config, profile, plan, states, num_blocks, bound, compiles, seconds)

    @property
    def budget(self) -> MemoryBudget:
        """The memory that the model will take. Ask before the pool is made."""
        config, profile = self.config, self.profile
        step = _step_bytes(self.model, profile, config)
        gathered = self.gathered if _computes_plainly(profile) else 0
        pool = self.num_blocks * planned_block_bytes(self.plan.arrays)
        pool += self.states.num_bytes
        pool += self.model.kept_bytes if isinstance(self.model, HostedModel) else 0
        is_asked = config.kv_memory is not None or config.num_blocks is not None
        weights = sum(each.nbytes for _, each in tree_flatten(self.model.parameters()))
        weights += _adapter_bytes(config)
        cache = config.cache_limit
        if cache is None or gpu_memory() is None:
            of_step = step + gathered
            others = memory_in_use() + pool + of_step
            cache = default_cache_limit(pool if is_asked else None, of_step, others)
        tokens = 0  # where no layer stores K/V, any number fits
        if self.plan.width:
            tokens = self.num_blocks // self.plan.width * config.block_size
        return MemoryBudget(weights, pool, cache, step, gathered, tokens, self.bound)

    @property
    def worth(self) -> TextWorth:
        """What the parts of a text are worth that the model computes."""
        block_bytes = self.plan.width * planned_block_bytes(self.plan.arrays)
        work = text_work(self.model, self.profile)
        return TextWorth(work, block_bytes, self.profile.states.kept_bytes)

    @property
    def gathered(self) -> int:
        """Bytes that a step takes more where plain MLX computes."""
        of_step = partial(_step_bytes, self.model, self.profile, self.config)
        return max(0, of_step(plain=True) - of_step())


class PooledModel:
    """A model, its pool, the allocator of the pool's blocks, and the runner that computes steps.

    Args:
        make_runner: :class:`ModelRunner` or a function with its arguments.
        make_allocator: :class:`BlockAllocator` or a function with its arguments.
        is_alone: whether this process computes the model's steps without other processes.

    Attributes:
        command_bound: bounds the chunks of steps by what a command of a GPU takes; None: no Mac's.
        longest_chunk: prompt tokens of a step at most, if nothing else runs or waits.
        limits: of MLX's memory, held while the pool lives; None on a CPU.
        prewarm_seconds: that the GPU's pipelines took; None: none was compiled yet.
        refused_kernels: by kernel, what the GPU's compiler says against it.
    """

    def __init__(
        self,
        measured: MeasuredModel,
        make_runner: Callable[..., ModelRunner] = ModelRunner,
        make_allocator: Callable[..., BlockAllocator] = BlockAllocator,
        is_alone: bool = True,
    ) -> None:
        config, self.plan, self.profile = measured.config, measured.plan, measured.profile
        self.config, self._is_alone = config, is_alone
        self.longest_chunk = _longest_chunk_of(self.plan, config)
        block_size, num_blocks = config.block_size, measured.num_blocks
        worth = measured.worth
        self.allocator = make_allocator(
            num_blocks,
            block_size,
            self.plan.groups,
            self.longest_chunk,
            measured.states.kind(worth),
            partial(WorthOrder, max_pinned=config.max_pinned),
            worth,
        )
        self._has_compiled = measured.has_compiled
        self._kernel_seconds = measured.kernel_seconds
        self._budget = measured.budget
        self._gathered = measured.gathered
        cache = self._budget.cache
        self.limits = None if cache is None else HeldLimits(cache, is_wired(config.wired))
        if self.limits is not None:
            self._budget = replace(self._budget, cache=self.limits.cache)
        holder = self.limits and self.limits.holder
        self.pool = KVPool((), num_blocks, block_size, self.plan, num_blocks, holder)
        promise(self.allocator.states)
        self._hosted = measured.model if isinstance(measured.model, HostedModel) else None
        self.runner = make_runner(
            measured.model,
            self.profile,
            self.plan.places,
            self.allocator,
            self.pool,
            cpu_linear=config.cpu_linear,
            make_prefixes=None if config.cascade else no_prefixes,
        )
        # Of the GPU's commands; Metal's are ended if they take long.
        self.command_bound = None
        if working_set() is not None:
            self.command_bound = command_bound(measured.model, self.profile)
        self.runner.compile_decodes(config.compile, config.max_running)
        self.prewarm_seconds: float | None = None
        self.refused_kernels = ops.refused

    @property
    def budget(self) -> MemoryBudget:
        """What the model takes of the memory, as far as the GPU's compiler has been asked."""
        is_plain = _computes_plainly(self.profile)
        return replace(self._budget, gathered=self._gathered if is_plain else 0)

    @property
    def reports(self) -> dict[str, Any]:
        """What the parts report in an engine's statistics, by the field's name."""
        return self.runner.reports | {"refused_kernels": self.refused_kernels}

    def holdings(self) -> list[Holding]:
        """What the model, its pool and its states take of the memory now."""
        weights = self._budget.weights - _adapter_bytes(self.config)
        return [
            Holding("weights", weights, weights, CountedBy.MLX),
            *pool_holdings(self.pool, self.allocator),
            *self.allocator.states.holdings(),
            *(self._hosted.holdings() if self._hosted is not None else ()),
            *self.runner.holdings(),
        ]

    def warm_up(self) -> None:
        """Compile the GPU's pipelines, those of this package and, in one process, those of MLX for
        the first steps. Then trace the decodes for the thread that calls this: a trace asks for
        pipelines."""
        if self.prewarm_seconds is None:
            seconds = self._kernel_seconds
            if not self._has_compiled:
                seconds = _compiled([self.profile], self.config)
            if seconds is not None and self._is_alone:
                started = time.perf_counter()
                self._compute_once()
                seconds += time.perf_counter() - started
            self.prewarm_seconds = seconds
        self.runner.warm_up()

    def _compute_once(self) -> None:
        """Compute a chunk and a decode of nobody's request: MLX compiles its own pipelines."""
        size = min(LONG_CHUNK, self.config.prefill_chunk)
        request = Request(NOBODY, [0] * (size + 1), SamplingParams(max_tokens=1), seed=0)
        allocator, runner = self.allocator, self.runner
        try:
            allocator.admit(NOBODY, size + 1)
            for start, stop in ((0, size), (size, size + 1)):
                allocator.make_writable(NOBODY, start, stop)
                move = allocator.advance(NOBODY, start, stop)
                step = Step([Span.of(request, start, stop, stop > size, move)])
                runner.collect(runner.launch(step, None))
        except OutOfBlocksError:
            pass
        except Exception:
            runner.recover()
            raise
        finally:
            if NOBODY in allocator:
                allocator.free(NOBODY)
            runner.release(allocator.take_released())

    @property
    def way(self) -> str:
        """How decodes are computed, in words. All ranks have to compute them in the same way."""
        why_plain = self.runner.why_plain
        return "compiled decodes" if why_plain is None else f"plain decodes: {why_plain}"

    @property
    def blocks_in_use(self) -> int:
        return self.allocator.store.blocks_in_use

    def check_integrity(self) -> None:
        """Assert that every block is free, cached or held and that nothing leaks."""
        self.allocator.check_integrity()


def _compiled(
    profiles: Sequence[ModelProfile], config: PoolConfig, compiles: bool = True
) -> float | None:
    """The seconds that it takes to compile the pipelines of models with these profiles, on pools of
    two blocks; None if there are no pipelines, or `compiles` is False. The first model is that of
    `config`."""
    seconds = []
    for profile in profiles if compiles else ():
        plan = profile.pool_plan(config.block_size)
        only_ragged = profile.batching is Batching.MIXED
        transfers = config.transfers_blocks and profile is profiles[0]
        took = prewarm(profile.attentions, config.block_size, plan, transfers, only_ragged)
        seconds += [] if took is None else [took]
    return sum(seconds) if seconds else None


def _beside(step: int, config: PoolConfig, states: int) -> Beside:
    """What is beside a default pool on the device."""
    if gpu_memory() is None:
        return Beside(0, 0, states)
    cache = config.cache_limit
    if cache is None:
        cache = default_cache_limit(None, step) or 0
    return Beside(step, max(0, cache - step), states)


def _adapter_bytes(config: PoolConfig) -> int:
    """Bytes that the adapters of requests take at most, unless one step needs more."""
    return 0 if config.adapters is None else config.adapter_memory


def _needs(model: nn.Module, plan: PoolPlan, config: PoolConfig) -> Needs:
    """What the requests of an engine with these options need of a pool."""
    return Needs.of(
        plan.groups,
        config.block_size,
        _longest_chunk_of(plan, config),
        config.max_running,
        positions_of(model),
        config.max_kv_tokens,
    )


def _longest_chunk_of(plan: PoolPlan, config: PoolConfig) -> int:
    """Prompt tokens of a step at most. A sequence takes the blocks of its longest chunk in each
    group that keeps a window."""
    keeps_all = all(group.keeps_all for group in plan.groups)
    return _longest_chunk(config) if keeps_all else config.prefill_chunk


def _longest_chunk(config: PoolConfig) -> int:
    """Prompt tokens of a step at most. A CPU gains nothing from more of them."""
    chunk = config.prefill_chunk
    return chunk if gpu_memory() is None else longest_chunk(chunk)


def _computes_plainly(profile: ModelProfile) -> bool:
    """Whether plain MLX computes some of a model's layers on a GPU, as far as the GPU's compiler
    has been asked."""
    if gpu_memory() is None:
        return False
    shapes = (kind.shape for kind in profile.attentions)
    kernels = {ops.kernel_for(None, each.head_dim, each.v_head_dim) for each in shapes}
    return bool(ops.plain) or not kernels <= {"native"} or max_paged_queries() == 0


def _step_bytes(
    model: nn.Module, profile: ModelProfile, config: PoolConfig, plain: bool = False
) -> int:
    """Bytes of a step at most: of a chunk beside others, or of a longer one alone. `plain`: plain
    MLX computes it."""
    of_steps = (config.prefill_chunk, config.max_running), (_longest_chunk(config), 1)
    return max(step_bytes(model, profile, *sizes, plain=plain) for sizes in of_steps)


def _share(profile: ModelProfile, beside: ModelProfile) -> float:
    """The part of the memory for K/V that a model gets beside another model with as many slots."""
    ours, theirs = (
        sum(shape.token_bytes for shape in each.shapes if shape is not None)
        for each in (profile, beside)
    )
    return ours / (ours + theirs) if theirs else 1.0
