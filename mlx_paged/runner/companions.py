"""What an engine computes beside its model: the companion of the model."""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.nn as nn

from mlx_paged.options import EngineConfig
from mlx_paged.runner.launched_step import LaunchedStep
from mlx_paged.runner.model_probe import ModelProfile
from mlx_paged.runner.pooled_model import PooledModel
from mlx_paged.scheduler.decoding import MakeDecoding


class Companion(Protocol):
    """Computes beside an engine's model, and takes a part of the memory for K/V."""

    @property
    def stores(self) -> ModelProfile | None:
        """What its own model stores; None: it has no model."""

    @property
    def reads(self) -> Sequence[int]:
        """The hidden states of the engine's model that it reads, as in ``Head.states``."""

    @property
    def models(self) -> Sequence[PooledModel]:
        """Its model on a pool of its own; none before :meth:`start`, and none if it has no
        model."""

    @property
    def observers(self) -> Sequence[Callable[[LaunchedStep], None]]:
        """What sees each step of the engine's model when the step has been settled."""

    @property
    def make_decoding(self) -> MakeDecoding | None:
        """Makes the scheduler's way to decode; None: that without a companion."""

    def start(self, pooled: PooledModel) -> None:
        """Make a pool with room for as many tokens as that of the engine's model, which is
        `pooled`."""

    def resize(self, room: int) -> None:
        """Let its pool have room for so many blocks of all layers, while no step is under way."""


class NoCompanion:
    """Nothing is computed beside the model."""

    stores = make_decoding = None
    reads: Sequence[int] = ()
    models: Sequence[PooledModel] = ()
    observers: Sequence[Callable[[LaunchedStep], None]] = ()

    def start(self, pooled: PooledModel) -> None:
        pass

    def resize(self, room: int) -> None:
        pass


MakeCompanion = Callable[[nn.Module, ModelProfile, EngineConfig], Companion]
"""Makes the companion of a model with this profile, as the options say."""
