"""Steps, each launched while the one before it is still being computed. Knows no mlx."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Generic

from mlx_paged.request import Request
from mlx_paged.scheduler.runner_protocol import Fault, LaunchedT, Runner, StepResult
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import Step

MAX_FAULTS = 3
"""Failed steps after which a request is given up, even if it was never alone in one."""


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


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold back SIGINT until the end of this context, so that what is within happens wholly.

    Only Python's own handlers can be held back, and only the main thread ever gets the signal:
    elsewhere, and where SIGINT is ignored, nothing is done.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])
