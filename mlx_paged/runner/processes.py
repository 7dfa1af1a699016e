"""Which processes compute a model: this one alone, or several together."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import mlx.nn as nn

from mlx_paged.options import PoolConfig
from mlx_paged.runner.launched_step import LaunchedStep
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.runner.placed_terms import TermSource
from mlx_paged.runner.pooled_model import MeasuredModel, PooledModel
from mlx_paged.runner.skip_unsampled import attached_to
from mlx_paged.scheduler.step import Runner


class Computing(NamedTuple):
    """A model on a pool, what computes its steps, and what this reports in an engine's statistics,
    by the field's name."""

    pooled: PooledModel
    runner: Runner[LaunchedStep]
    reports: Mapping[str, Any]


class Processes(Protocol):
    """The processes that compute a model."""

    is_alone: bool
    """Whether this process computes the model alone."""

    listeners: list[Callable[[Any], None]]
    """Called with the error when a process is lost, before this process ends."""

    def check(self, config: PoolConfig) -> None:
        """Raise ValueError for an option that these processes cannot have."""

    def pooled(
        self,
        measured: MeasuredModel,
        make_runner: Callable[..., ModelRunner] = ModelRunner,
        source: TermSource | None = None,
    ) -> Computing:
        """The model on a pool, for which all processes have memory. Its rows have the terms of
        `source`."""


class OneProcess:
    """This process alone."""

    is_alone = True

    def __init__(self) -> None:
        self.listeners: list[Callable[[Any], None]] = []  # nothing else can be lost

    def check(self, config: PoolConfig) -> None:
        """No option is refused."""

    def pooled(
        self,
        measured: MeasuredModel,
        make_runner: Callable[..., ModelRunner] = ModelRunner,
        source: TermSource | None = None,
    ) -> Computing:
        pooled = PooledModel(measured, make_runner)
        pooled.runner.row_terms = None if source is None else source.terms
        return Computing(pooled, pooled.runner, {})


def processes_of(model: nn.Module) -> Processes:
    """The processes that compute a model, which several of them may have joined."""
    found: Processes | None = attached_to(model, "processes", lambda model: None)
    return OneProcess() if found is None else found


def join(model: nn.Module, processes: Processes) -> None:
    """Let engines of the model compute with these processes from now on."""
    attached_to(model, "processes", lambda model: processes)
