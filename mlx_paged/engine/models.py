"""The parts of an engine of a model: the model on its pool, its companion, the scheduler."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from mlx_paged.adapters.store import AdapterStore
from mlx_paged.arguments import GB, require
from mlx_paged.engine.ledger import Ledger, libraries_bytes
from mlx_paged.engine.text import Tokenizer
from mlx_paged.kv.limits import HeldLimits
from mlx_paged.kv.memory import MemoryBudget, gpu_memory
from mlx_paged.kv_disk.opening import open_tier
from mlx_paged.metrics.recorder import KVReads, PhaseTimes, RecorderConfig, TickLog, TickWriter
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.options import EngineConfig, Policy, PreemptionPolicy
from mlx_paged.runner.companions import Companion, MakeCompanion, NoCompanion
from mlx_paged.runner.device_errors import telling_errors
from mlx_paged.runner.launched_step import LaunchedStep
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.runner.pooled_model import MeasuredModel, PooledModel, probed
from mlx_paged.runner.processes import Processes, processes_of
from mlx_paged.runner.profiling import ProfilingRunner
from mlx_paged.scheduler.scheduler import PredictSeconds, Scheduler
from mlx_paged.scheduler.step import Runner
from mlx_paged.scheduler.tier import Tier

WATERMARK = 0.01
"""The part of the pool that must stay free when a request is admitted while others run."""


@dataclass(frozen=True, slots=True)
class EngineModels:
    """The model of an engine on its pool, its companion, and the adapters of requests."""

    processes: Processes
    pooled: PooledModel
    runner: Runner[LaunchedStep]
    reports: Mapping[str, Any]  # what `runner` reports in the statistics, by the field's name
    companion: Companion
    adapters: AdapterStore | None

    @classmethod
    @telling_errors()
    def of(
        cls,
        model: nn.Module,
        config: EngineConfig,
        phases: PhaseTimes | None,
        make_companion: MakeCompanion | None,
    ) -> "EngineModels":
        """Put the models on their pools. All weights are in memory before the pools are measured.
        The companion's pool comes second, because it has as many slots as the model's. With
        `phases` each phase of a step is timed."""
        processes = processes_of(model)
        processes.check(config)
        adapters = AdapterStore.of(model, config)
        profile = probed(model, config)
        companion: Companion = NoCompanion()
        if make_companion is not None:
            companion = make_companion(model, profile, config)
        compiles = config.prewarm is not False
        measured = MeasuredModel.of(model, profile, config, companion.stores, compiles)
        make_runner: Callable[..., ModelRunner]
        make_runner = ModelRunner if phases is None else partial(ProfilingRunner, phases)
        if companion.reads:
            make_runner = partial(make_runner, reads_states=companion.reads)
        pooled, runner, reports = processes.pooled(measured, make_runner, adapters)
        companion.start(pooled)
        return cls(processes, pooled, runner, reports, companion, adapters)

    @property
    def both(self) -> list[PooledModel]:
        """The model, and that of the companion if it has one."""
        return [self.pooled, *self.companion.models]

    @property
    def resizable(self) -> ModelRunner | None:
        """The runner whose pool may change its size; None: other processes would not follow, or the
        pool takes no memory."""
        pooled = self.pooled
        return pooled.runner if self.processes.is_alone and pooled.pool.block_bytes else None

    def follow(self, num_blocks: int) -> None:
        """Let the companion's pool follow a new size of the model's pool."""
        width = self.pooled.plan.width or 1  # 0: no layer stores K/V
        self.companion.resize(num_blocks // width)

    @property
    def limits(self) -> list[HeldLimits]:
        """The limits of MLX's memory that the pools of both models hold."""
        return [each.limits for each in self.both if each.limits is not None]

    @telling_errors()
    def warm_up(self) -> float | None:
        """Warm up both models. Returns seconds of the GPU's pipelines; None if there are none."""
        for each in self.both:
            each.warm_up()
        return sum(each.prewarm_seconds or 0.0 for each in self.both) or None

    @property
    def budget(self) -> MemoryBudget:
        """The memory that both models take."""
        return reduce(MemoryBudget.beside, [each.budget for each in self.both])


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is composed of.

    Attributes:
        models: the model on its pool, and its companion.
        scheduler: decides what each step computes.
        stats: counters.
        instruments: measure each step.
        ledger: what the engine holds.
    """

    models: EngineModels
    scheduler: Scheduler
    stats: EngineStats
    instruments: RecorderConfig
    ledger: Ledger

    @classmethod
    def of(
        cls,
        model: nn.Module,
        tokenizer: Any,
        config: EngineConfig,
        make_companion: MakeCompanion | None = None,
    ) -> "EngineParts":
        """Make the parts. The models are warmed up if `config` says so.

        Raises:
            UnsupportedModelError: results for this model could be wrong.
            ValueError: no room for the pool, or `kv_disk` cannot be used or is in use.
            OSError: `metrics_jsonl` cannot be written.
        """
        libraries_bytes()  # before the pool takes memory
        writer = None if config.metrics_jsonl is None else TickWriter(config.metrics_jsonl)
        phases = PhaseTimes() if config.profile else None
        models = EngineModels.of(model, config, phases, make_companion)
        pooled = models.pooled
        prewarm_seconds = models.warm_up() if config.prewarm else None
        opener = _tier_opener(config, model, tokenizer, pooled)
        stats = EngineStats(
            config.block_size,
            pooled.pool.block_bytes,
            pooled.pool.num_blocks,
            prewarm_seconds=prewarm_seconds,
            memory_budget=models.budget.parts,
            **pooled.reports,
            **models.reports,
        )
        scheduler = _scheduler(config, models, opener)
        ledger = Ledger([each.holdings for each in models.both], models.budget)
        ledger.holders.append(scheduler.holdings)
        if models.adapters is not None:
            ledger.holders.append(models.adapters.holdings)
        instruments = RecorderConfig(
            TickLog(spike_ms=config.spike_ms, profile=config.profile),
            KVReads(pooled.profile.read_bytes, config.block_size),
            phases,
            writer,
            ledger.report,
        )
        return cls(models, scheduler, stats, instruments, ledger)


def with_detokenizer(tokenizer: Any) -> Tokenizer | None:
    """The tokenizer; as in mlx-lm, one of transformers gets a wrapper with a detokenizer. Raises
    ValueError for anything else."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = TokenizerWrapper(tokenizer)
    is_tokenizer = tokenizer is None or hasattr(tokenizer, "detokenizer")
    expected = "the second value of mlx_lm.load(path), a tokenizer of transformers, or None"
    require(is_tokenizer, "Engine", "tokenizer", tokenizer, expected)
    wrapped: Tokenizer | None = tokenizer
    return wrapped


def _tier_opener(
    config: EngineConfig, model: nn.Module, tokenizer: Any, pooled: PooledModel
) -> Callable[[PredictSeconds], Tier] | None:
    """A function that opens the directory of K/V; None if there is none."""
    if config.kv_disk is None:
        return None
    limit = int(config.kv_disk_gb * GB)
    opened = partial(open_tier, config.kv_disk, limit, config.model_files, model, tokenizer, pooled)
    return telling_errors()(opened)


def _scheduler(
    config: EngineConfig,
    models: EngineModels,
    open_tier: Callable[[PredictSeconds], Tier] | None,
) -> Scheduler:
    """The scheduler of an engine's requests."""
    pooled, max_stall_ms = models.pooled, config.max_stall_ms
    return Scheduler(
        pooled.allocator,
        config.max_running,
        config.prefill_chunk,
        prefix_cache=config.prefix_cache,
        policy=Policy(config.policy),
        victims=PreemptionPolicy(config.preempt),
        max_stall=None if max_stall_ms is None else max_stall_ms / 1000,
        watermark=int(WATERMARK * pooled.pool.num_blocks),
        make_decoding=models.companion.make_decoding,
        open_tier=open_tier,
        few_sizes=gpu_memory() is not None,
        alone_chunk=pooled.longest_chunk,
        bound=pooled.command_bound,
        scores=models.processes.is_alone,
    )
