"""Steps, each launched while the one before it is still being computed. Knows no mlx."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from mlx_paged.request import Request
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import Step

MAX_FAULTS = 3
"""Failed steps after which a request is given up, even if it was never alone in one."""


class Choice(NamedTuple):
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

    def collect(self, launched: LaunchedT) -> list[Choice]:
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
    choices: list[Choice] = field(default_factory=list)
    seconds: float = 0.0
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0
    prompt_tokens: int = 0
    launched: list[Step] = field(default_factory=list)
    launched_prompt_tokens: int = 0
    blocks_in_use: int = 0
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class _UnderWay(Generic[LaunchedT]):
    launched: LaunchedT
    step: Step
    seconds: float  # to schedule and launch it
    prompt_tokens: int
    blocks_in_use: int


class StepPipeline(Generic[LaunchedT]):
    """Runs the scheduler's steps, one ahead of what has been read.

    While the device computes a step, the host schedules and launches the next one, whose inputs
    are the tokens still being chosen. A request that turns out to have ended has one token too
    many under way, which is dropped; its blocks may be given away at once, because the device
    computes steps in order.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner[LaunchedT], clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._under_way: _UnderWay[LaunchedT] | None = None

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._under_way is not None

    def advance(self, ahead: bool) -> StepResult:
        """Bring one step to its end, with the next one launched before if `ahead`.

        Failures of the model are not raised but in the result. The caller takes in the choices and
        then calls :meth:`recover`.
        """
        result = StepResult()
        current, self._under_way = self._under_way, None
        if current is None:
            current = self._launch(None, result)
        if current is None:
            return result
        if ahead:
            self._under_way = self._launch(current, result)
        self._collect(current, result)
        return result

    def recover(self, fault: Fault) -> list[Request]:
        """Start over after a failure; returns the requests that are to blame for it."""
        self._under_way = None
        self._runner.recover()
        alive = [request for request in fault.requests if not request.is_finished]
        self._scheduler.recover(alive)
        if not isinstance(fault.error, Exception):  # KeyboardInterrupt is nobody's fault
            return []
        for request in alive:
            request.num_faults += 1
        was_alone = len(fault.requests) == 1
        return [r for r in alive if was_alone or r.num_faults >= MAX_FAULTS]

    def _launch(
        self, before: _UnderWay[LaunchedT] | None, result: StepResult
    ) -> _UnderWay[LaunchedT] | None:
        started = self._clock()
        step = self._scheduler.schedule()
        scheduled = self._clock()
        result.schedule_seconds += scheduled - started
        try:
            if not step.spans:
                assert not step.copies, "copies without a step that performs them"
                return None
            launched = self._runner.launch(step, before.launched if before else None)
        except BaseException as error:
            result.fault = Fault(step.everyone, error)
            return None
        finally:
            self._scheduler.allocator.copies_done()
        launched_at = self._clock()
        self._scheduler.commit(step)
        committed_at = self._clock()
        for request in launched.requests:
            request.num_in_flight += not request.synchronous
        for index, cause in launched.errors.items():
            launched.requests[index].error = cause
        in_use = self._scheduler.allocator.blocks_in_use
        prompt_tokens = step.prompt_tokens
        result.launched.append(step)
        result.launched_prompt_tokens += prompt_tokens
        ended = self._clock()
        result.schedule_seconds += committed_at - launched_at
        result.launch_seconds += launched_at - scheduled + ended - committed_at
        return _UnderWay(launched, step, ended - started, prompt_tokens, in_use)

    def _collect(self, current: _UnderWay[LaunchedT], result: StepResult) -> None:
        started = self._clock()
        try:
            choices = self._runner.collect(current.launched)
        except BaseException as error:
            later = self._under_way.step.everyone if self._under_way else []
            result.fault = Fault(list(dict.fromkeys(current.step.everyone + later)), error)
            return
        result.wait_seconds = self._clock() - started
        result.step = current.step
        result.seconds = current.seconds + result.wait_seconds
        result.prompt_tokens = current.prompt_tokens
        result.blocks_in_use = current.blocks_in_use
        for request in current.launched.requests:
            request.num_in_flight -= not request.synchronous
        result.choices = [choice for choice in choices if not choice.request.is_finished]
        committing = self._clock()
        self._scheduler.commit(current.step)
        self._scheduler.budget.observe(current.step.work, result.seconds)
        result.schedule_seconds += self._clock() - committing
