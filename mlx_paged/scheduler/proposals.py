"""What the scheduler asks of a source of proposals, which guesses tokens before a model chooses
them. Knows no mlx."""

from collections.abc import Callable
from typing import ClassVar, Protocol

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
    def num_computed(self) -> int:
        """Guesses that steps computed."""

    @property
    def num_right(self) -> int:
        """Guesses that were right."""

    @property
    def by_depth(self) -> list[list[int]]:
        """For each depth the guesses that steps computed, and those of them that were right."""

    def schedule(self, planning: Planning, decodes: list[Request]) -> list[Request]:
        """Add spans with guesses for some of the requests that compute one token; return the
        others."""

    def learn(self, report: StepReport) -> None:
        """Learn from a step that has been settled which guesses were right."""

    def drop(self, request: Request) -> None:
        """Forget an ended request."""

    def recover(self) -> None:
        """Forget what was computed, because a step failed and it may be wrong."""


class NoProposals:
    """A source that guesses nothing."""

    exist = reads_first = False
    num_computed = num_right = 0
    by_depth: ClassVar[list[list[int]]] = []

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
