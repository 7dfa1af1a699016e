"""What the scheduler asks of a source of proposals, which guesses tokens before a model chooses
them. Knows no mlx."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.request import Request
from mlx_paged.scheduler.budget import ChunkBudget
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.step import StepReport


class Proposals(Protocol):
    """Adds spans with guessed tokens to steps. What a source computes for its guesses is its own:
    its sequences, their K/V and the memory for these."""

    @property
    def exist(self) -> bool:
        """Whether a step may give a request several tokens."""

    @property
    def reads_first(self) -> bool:
        """Whether the next step will have guesses, so that the step under way must be read before
        the next step is planned."""

    @property
    def reported(self) -> Mapping[str, Any]:
        """What the source has done so far: values by fields of
        :class:`mlx_paged.metrics.stats.EngineStats`."""

    def schedule(self, planning: Planning, decodes: list[Request]) -> list[Request]:
        """Add spans with guesses for some of the requests that compute one token; return the
        others."""

    def learn(self, report: StepReport) -> None:
        """Learn from a step that has been settled which guesses were right."""

    def drop(self, request: Request) -> None:
        """Forget an ended request."""

    def recover(self) -> None:
        """Forget the computed guesses: a step failed, and they may be wrong."""


class NoProposals:
    """A source that guesses nothing."""

    exist = reads_first = False
    reported: ClassVar[Mapping[str, Any]] = {}

    def schedule(self, planning: Planning, decodes: list[Request]) -> list[Request]:
        return decodes

    def learn(self, report: StepReport) -> None:
        pass

    def drop(self, request: Request) -> None:
        pass

    def recover(self) -> None:
        pass


MakeProposals = Callable[[BlockAllocator, ChunkBudget], Proposals]
"""Makes a source for the scheduler with this allocator and this budget."""
