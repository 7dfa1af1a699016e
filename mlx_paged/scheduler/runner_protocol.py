"""TODO."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from mlx_paged.request import Request
from mlx_paged.scheduler.step import Step


class SampledToken(NamedTuple):
    """The next token of one request; for a beam only its most likely ones count.

    Attributes:
        logprob: of the token under the model, after penalties, before temperature and filters.
        top: most likely tokens and their log-probabilities, best first, as many as asked for.
        error: why there is no token.
    """

    request: Request
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    error: Exception | None = None


class Launched(Protocol):
    """A step under way."""

    @property
    def requests(self) -> list[Request]:
        """Those that get a token."""

    @property
    def errors(self) -> dict[int, Exception]:
        """What is known to have failed, by index into `requests`."""


LaunchedT = TypeVar("LaunchedT", bound=Launched)


class Runner(Protocol[LaunchedT]):
    """What computes steps: the model, or a stand-in for tests."""

    def launch(self, step: Step, before: LaunchedT | None) -> LaunchedT:
        """Start a step; tokens that `before` is still choosing are taken from there.

        Its restores come before its spans, whose snapshots are filled once they are known.
        """

    def collect(self, launched: LaunchedT) -> list[SampledToken]:
        """Wait for a step; one choice for each of its requests, in order."""

    def drop(self, request: Request) -> None:
        """Forget what is kept for a request outside the pool; if it has a snapshot, that is where
        its recurrent states go."""

    def fork(self, parent: Request, child: Request) -> None:
        """Let a child begin with what is kept for its parent outside the pool."""

    def recover(self) -> None:
        """Give up steps under way and everything that they may have damaged."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A step that failed: whom it dealt with, and what was raised."""

    requests: list[Request]
    error: BaseException


@dataclass(slots=True)
class StepResult:
    """A step that ended, or `step` None if there was nothing to compute.

    Attributes:
        seconds: that the host spent on it: launching it, which on a CPU takes most of its
            computation, and then waiting for it. Those of all steps add up to the time that passed.
        schedule_seconds: of the call, whichever step they were spent on; so are the next two.
        launch_seconds: building and handing over.
        wait_seconds: for the device.
        prompt_tokens: of `step`.
        launched: what was launched in the call.
        launched_prompt_tokens: of those.
        blocks_in_use: when it was launched.
        fault: this step or the one launched meanwhile failed; the choices are valid nonetheless.
    """

    step: Step | None = None
    choices: list[SampledToken] = field(default_factory=list)
    seconds: float = 0.0
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0
    prompt_tokens: int = 0
    launched: list[Step] = field(default_factory=list)
    launched_prompt_tokens: int = 0
    blocks_in_use: int = 0
    fault: Fault | None = None
