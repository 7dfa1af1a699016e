"""What the engine and a runner exchange: steps, sampled tokens, results. Knows no mlx."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.request import Request
from mlx_paged.scheduler.step import Step


class SampledToken(NamedTuple):
    """The next token of one request. A beam search uses only `top`."""

    request: Request
    token: int
    logprob: float  # of the token, after penalties, before temperature and filters
    # The most likely tokens and their log-probabilities, best first.
    top: tuple[tuple[int, float], ...] = ()
    error: Exception | None = None  # why there is no token


class Launched(Protocol):
    """A step that a runner has started."""

    @property
    def requests(self) -> list[Request]:
        """The requests that get a token."""

    @property
    def errors(self) -> dict[int, Exception]:
        """Known errors by index into `requests`."""


LaunchedT = TypeVar("LaunchedT", bound=Launched)


class Runner(Protocol[LaunchedT]):
    """Computes steps: the model, or a fake one in tests."""

    def launch(self, step: Step, before: LaunchedT | None) -> LaunchedT:
        """Start a step. Input tokens that are not known yet come from `before`. Recurrent states
        are restored before the spans are computed; the spans' snapshots are filled after them."""

    def transfer(self, stores: Sequence[BlockTransfer], loads: Sequence[BlockTransfer]) -> None:
        """Start to copy blocks out of the pool, then to write others, before any later step."""

    def collect(self, launched: LaunchedT) -> list[SampledToken]:
        """Wait for a step; return one token for each of its requests, in order."""

    def drop(self, request: Request) -> None:
        """Drop a request's recurrent states; if it has a snapshot, they move there."""

    def fork(self, parent: Request, child: Request) -> None:
        """Let a child start with its parent's recurrent states."""

    def recover(self, error: BaseException | None = None) -> None:
        """Discard the steps under way and all states that `error` may have damaged. Until then, an
        error of the device is raised by every launch, and when any step is collected."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A step that failed: its requests and the exception."""

    requests: list[Request]
    error: BaseException


@dataclass(slots=True)
class StepResult:
    """The step that ended in a call, and the steps that the call launched."""

    step: Step | None = None  # None if there was nothing to compute
    choices: list[SampledToken] = field(default_factory=list)
    # Host time of `step`: launch plus wait. Summed over all steps it equals wall time.
    seconds: float = 0.0
    schedule_seconds: float = 0.0  # of the call, for any step; so are the next two
    launch_seconds: float = 0.0  # building and submitting the graph
    wait_seconds: float = 0.0  # waiting for the device
    launched: list[Step] = field(default_factory=list)  # the steps launched in the call
    blocks_in_use: int = 0  # when `step` was launched
    fault: Fault | None = None  # `step` or a launched one failed. The choices are still valid.
