"""The model of an engine on its pool, and what drafts for it."""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import mlx.nn as nn

from mlx_paged.kv.limits import HeldLimits
from mlx_paged.kv.memory import MemoryBudget
from mlx_paged.metrics.recorder import PhaseTimes
from mlx_paged.options import EngineConfig
from mlx_paged.runner.device_errors import telling_errors
from mlx_paged.runner.draft_model import DraftModel, can_draft, probed_draft
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.runner.pooled_model import MeasuredModel, PooledModel, probed
from mlx_paged.runner.profiling import ProfilingRunner
from mlx_paged.runner.ranks import LeadingRunner, Ranks
from mlx_paged.scheduler.ngram import NgramDrafter
from mlx_paged.scheduler.speculation import Drafter

DRAFTERS = {"ngram": NgramDrafter}
"""What guesses tokens without a model, by the values of ``speculate``."""


@dataclass(frozen=True, slots=True)
class EngineModels:
    """What computes an engine's steps, and what guesses their tokens."""

    pooled: PooledModel
    runner: ModelRunner | LeadingRunner
    drafter: Drafter | None

    @classmethod
    @telling_errors()
    def of(
        cls, model: nn.Module, config: EngineConfig, phases: PhaseTimes | None
    ) -> "EngineModels":
        """Put the models on their pools. All weights are in memory before the pools are measured.
        The draft model's pool comes second, because it has as many slots as the model's. With
        `phases` each phase of a step is timed."""
        ranks = Ranks.of(model)
        if ranks is not None and config.kv_disk is not None:
            raise ValueError("[Engine] kv_disk is given: expected none on ranks")
        profile = probed(model, config.kv_bits)
        draft_model = config.draft_model if can_draft(profile) else None
        of_draft = None if draft_model is None else probed_draft(profile, draft_model)
        measured = MeasuredModel.of(model, profile, config, beside=of_draft)
        make_runner = ModelRunner if phases is None else partial(ProfilingRunner, phases)
        runner: ModelRunner | LeadingRunner
        if ranks is None:
            pooled = PooledModel(measured, make_runner)
            runner = pooled.runner
        else:
            pooled, runner = ranks.pooled(measured, make_runner)
        drafter: Drafter | None = None
        if draft_model is not None and of_draft is not None:
            drafter = DraftModel.beside(pooled, draft_model, of_draft, config.num_draft_tokens)
        elif config.speculate is not None and can_draft(profile):
            drafter = DRAFTERS[config.speculate]()
        return cls(pooled, runner, drafter)

    @property
    def both(self) -> list[PooledModel]:
        """The model, and the draft model if there is one."""
        drafter = self.drafter
        return [self.pooled, *([drafter.pooled] if isinstance(drafter, DraftModel) else [])]

    @property
    def limits(self) -> list[HeldLimits]:
        """Those that both pools hold."""
        return [each.limits for each in self.both if each.limits is not None]

    @telling_errors()
    def warm_up(self) -> float | None:
        """Warm up both models. Returns seconds of the GPU's pipelines; None if there are none."""
        for each in self.both:
            each.warm_up()
        return sum(each.prewarm_seconds or 0.0 for each in self.both) or None

    @property
    def budget(self) -> MemoryBudget:
        """What both models take of the memory."""
        return reduce(MemoryBudget.beside, [each.budget for each in self.both])

    @property
    def rank_stats(self) -> dict[str, Any] | None:
        """What rank 0 has told the others; None in one process."""
        return self.runner.stats if isinstance(self.runner, LeadingRunner) else None
