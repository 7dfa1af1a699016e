"""What the scheduler asks of a way to decode: how the requests advance that have one token to
compute. Knows no mlx."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.request import Request
from mlx_paged.scheduler.budget import ChunkBudget
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.step import StepReport


class Decoding(Protocol):
    """Plans decodes: spans of the requests whose newest token is all that is left to compute.

    A decode chooses one token or, if its span has tokens beyond the request's own, several. What a
    way to decode keeps for this is its own: sequences, their K/V and the memory for these.
    """

    @property
    def gives_several(self) -> bool:
        """Whether a step may give a request several tokens."""

    @property
    def reads_first(self) -> bool:
        """Whether the step under way must be read before the next step is planned."""

    @property
    def reported(self) -> Mapping[str, Any]:
        """What it has done so far: values by fields of
        :class:`mlx_paged.metrics.stats.EngineStats`."""

    def schedule(self, planning: Planning, decodes: list[Request]) -> list[Request]:
        """Plan decodes without a change of any other request. Returns the requests for which this
        was not possible: the scheduler plans one token of each, and preempts others for it."""

    def learn(self, report: StepReport) -> None:
        """Learn from a step that has been settled. Called if `gives_several`."""

    def drop(self, request: Request) -> None:
        """Forget an ended request."""

    def recover(self) -> None:
        """Forget what is computed: a step failed, and it may be wrong."""


MakeDecoding = Callable[[BlockAllocator, ChunkBudget], Decoding]
"""Makes the way to decode of the scheduler with this allocator and this budget."""
