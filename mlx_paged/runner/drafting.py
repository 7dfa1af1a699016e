"""What guesses tokens beside an engine's model: the drafters that the engine's options ask for."""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.nn as nn

from mlx_paged.heads.opening import open_head
from mlx_paged.options import EngineConfig
from mlx_paged.runner.draft_model import DraftModel, can_draft, probed_draft
from mlx_paged.runner.head_drafter import HeadDrafter, head_model, probed_head
from mlx_paged.runner.launched_step import LaunchedStep
from mlx_paged.runner.model_probe import ModelProfile, require_model
from mlx_paged.runner.pooled_drafter import PooledDrafter
from mlx_paged.runner.pooled_model import PooledModel
from mlx_paged.scheduler.decoding import MakeDecoding
from mlx_paged.scheduler.ngram import NgramDrafter
from mlx_paged.scheduler.speculation import Drafter, Speculation

DRAFTERS = {"ngram": NgramDrafter}
"""What guesses tokens without a model, by the values of ``speculate``."""


class Drafting:
    """The drafters of an engine, a :class:`~mlx_paged.runner.companions.Companion` of its model.

    Args:
        model: the engine's model. There are no drafters if it computes one sequence at a time.
        profile: what it stores.
        config: the engine's options: `draft_model` or `draft_head`, `speculate`.

    Attributes:
        drafters: a draft model or a head, then what guesses without a model.

    Raises:
        ValueError: the draft model is no model, or it or the head does not fit the model.
    """

    def __init__(self, model: nn.Module, profile: ModelProfile, config: EngineConfig) -> None:
        self.stores: ModelProfile | None = None
        self.reads: Sequence[int] = ()
        self.observers: list[Callable[[LaunchedStep], None]] = []
        self.drafters: list[Drafter] = []
        self._make_pooled: Callable[[PooledModel], DraftModel | HeadDrafter] | None = None
        self._pooled: PooledDrafter | None = None
        num_tokens, small = config.num_draft_tokens, config.draft_model
        if small is not None:
            require_model("Engine", "draft_model", small)
        if not can_draft(profile):
            return
        if config.speculate is not None:
            self.drafters += [DRAFTERS[config.speculate]()]
        if config.draft_head is not None:
            head = head_model(open_head(config.draft_head, model), model, profile.logit_columns)
            self.stores, self.reads = probed_head(head), head.head.states
            self._make_pooled = partial(
                HeadDrafter.beside, model=head, profile=self.stores, num_tokens=num_tokens
            )
        elif small is not None:
            self.stores = probed_draft(profile, small)
            self._make_pooled = partial(
                DraftModel.beside, model=small, profile=self.stores, num_tokens=num_tokens
            )

    def start(self, pooled: PooledModel) -> None:
        """Put the draft model or the head on its pool."""
        if self._make_pooled is None:
            return
        self._pooled = drafter = self._make_pooled(pooled)
        self.drafters.insert(0, drafter)
        if isinstance(drafter, HeadDrafter):
            self.observers.append(drafter.settled)

    @property
    def models(self) -> list[PooledModel]:
        return [] if self._pooled is None else [self._pooled.pooled]

    @property
    def make_decoding(self) -> MakeDecoding | None:
        return partial(Speculation, self.drafters) if self.drafters else None

    def resize(self, room: int) -> None:
        if self._pooled is not None:
            self._pooled.resize(room)
