"""Launches each step while the device still computes the step before. Knows no mlx."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol

from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.metrics.recorder import GcPauses
from mlx_paged.request import Request
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import (
    Fault,
    LaunchedT,
    Observers,
    Runner,
    SampledToken,
    Step,
    StepResult,
    UnknownEndError,
)

LOGGER = logging.getLogger(__name__)

MAX_FAULTS = 3  # failed steps of a request before it ends, if none shows that it is the cause
MOST_KNOWN = 256  # tokens that a request gets beside its choice: its reader's inbox has room


class Pause(Protocol):
    """What is done between two steps while none is under way."""

    def is_due(self) -> bool:
        """Whether :meth:`run` has something to do. Called before each step."""

    def run(self) -> None:
        """Do what is due, while no step is under way."""

    def rest(self) -> None:
        """There is no step to compute at present. Called again and again meanwhile."""


class NoPause:
    """Nothing is done between steps."""

    def is_due(self) -> bool:
        return False

    def run(self) -> None:
        pass

    def rest(self) -> None:
        pass


class _Copies(NamedTuple):
    """Blocks that are on their way out of the pool, and what waits for them; None: nothing must."""

    stores: Sequence[BlockTransfer]
    wait: Callable[[], None] | None


@dataclass(frozen=True, slots=True)
class _UnderWay(Generic[LaunchedT]):
    launched: LaunchedT
    step: Step
    seconds: float  # to schedule and launch it
    copies: list[_Copies] = field(default_factory=list)  # that began with it or after it


class StepPipeline(Generic[LaunchedT]):
    """Runs the scheduler's steps, one step ahead of the tokens that have been read.

    While the device computes a step, the host schedules and launches the next step. The inputs of
    the next step are the tokens that the device is still choosing. If one of these tokens ends its
    request, the next step computes one token too many, which is dropped. The blocks of that request
    are free at once, because the device computes steps in order. A step is read before the next one
    is scheduled if the next one depends on its tokens (`Decoding.reads_first`), or if it has
    K/V from a disk: its requests have waited already.

    To begin a step can take nearly as long as the step: MLX returns when only few of its tasks are
    left to do. So a step with a chunk is held back: its graph is built and its first layers begin,
    then the tokens of the step before are read and returned, and the next call begins the rest.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[LaunchedT],
        pauses: GcPauses,  # no part of a step's times
        observers: Observers[LaunchedT],
    ) -> None:
        self._scheduler = scheduler
        self.runner = runner
        self._pauses = pauses
        self.observers = observers
        self.pause: Pause = NoPause()  # keeps a step from being launched ahead now and then
        self._under_way: _UnderWay[LaunchedT] | None = None
        self._last: dict[int, SampledToken] = {}  # of each request that may get several
        self._thread: int | None = None  # that called `advance` last to look ahead
        self._calls_of_thread = 0  # in a row, after the first one
        # So many, before a step is launched ahead: a step that another thread launched may be lost.
        self._patience = 0

    @property
    def busy(self) -> bool:
        return self._under_way is not None

    def advance(self, ahead: bool) -> StepResult:
        """Finish one step. If `ahead`, launch the next step first, unless another thread may call
        for it. A failure of the model is the result's fault, not raised: the caller uses the
        choices, then calls :meth:`recover`."""
        result = StepResult()
        ahead = ahead and self._is_of_thread()
        current, self._under_way = self._under_way, None
        pauses = self.pause.is_due()
        if current is None:
            if pauses and not self._paused(self.pause.run, result):
                return result
            current = self._launch(None, result)
        if current is not None:
            if ahead and not (pauses or current.step.is_read_first):
                self._under_way = self._launch(current, result)
            self._collect(current, result)
        result.ready = self._now()
        return result

    def _is_of_thread(self) -> bool:
        """Whether the thread that calls this is likely to ask for the next step, too. Only the
        thread that launches a step can begin all of it, and know whether a GPU fails in it."""
        thread, self._thread = self._thread, threading.get_ident()
        is_same = thread in (None, self._thread)
        self._calls_of_thread = self._calls_of_thread + 1 if is_same else 0
        return self._calls_of_thread > self._patience

    def known_after(self, choice: SampledToken) -> list[SampledToken]:
        """The tokens that must follow a request's latest choice by its constraint. A step under way
        chooses the first of them, too; that choice is dropped."""
        request = choice.request
        if request.constraint is None or request.finish_reason:
            return []
        if self._last.get(request.id, choice) is not choice:  # it is no last one
            return []
        known = request.constraint.ahead(request.tokens)
        if known:
            self._scheduler.foresee(request)
        # The next choice brings the others.
        return [SampledToken(request, token, 0.0, ((token, 0.0),)) for token in known[:MOST_KNOWN]]

    def recover(self, fault: Fault) -> list[Request]:
        """Start again after a failure; return the requests that end because of it."""
        self._under_way = None
        if isinstance(fault.error, UnknownEndError):
            self._patience = 2 * self._patience + 1
        try:
            self.runner.recover(fault.error)
        except Exception as error:
            raise error from fault.error
        alive = [request for request in fault.requests if not request.finish_reason]
        self._scheduler.recover(alive, halve=fault.is_devices)
        # No request causes a KeyboardInterrupt. No request causes the loss of a step that another
        # thread launched.
        if isinstance(fault.error, UnknownEndError) or not isinstance(fault.error, Exception):
            return []
        for request in alive:
            request.num_faults += 1
        was_alone = len(fault.requests) == 1 and not fault.is_devices
        return [r for r in alive if was_alone or r.num_faults >= MAX_FAULTS]

    def _launch(
        self, before: _UnderWay[LaunchedT] | None, result: StepResult
    ) -> _UnderWay[LaunchedT] | None:
        started = self._now()
        try:
            step = self._scheduler.schedule()
        except Exception as error:
            if before is None:
                raise
            result.fault = Fault([], error)  # the step under way counts first
            return None
        scheduled = self._now()
        result.plan_seconds = scheduled - started
        copies = list[_Copies]()
        try:
            if step.stores or step.loads:
                wait = self.runner.transfer(step.stores, step.loads)
                copies.append(_Copies(step.stores, wait))
            if not step.spans:
                if before is None:
                    self._put(copies)
                else:  # the copies may hold K/V of the step before, and are right if that step is
                    before.copies.extend(copies)
                assert not step.copies, "copies without a step that performs them"
                self._scheduler.copies_done()
                self.runner.release(step.released, step.rested)
                return None
            launched = self.runner.launch(step, before.launched if before else None)
        except BaseException as error:
            self._scheduler.copies_done()
            result.fault = Fault(step.everyone, error)
            return None
        launched_at = self._now()
        report = launched.report
        self._scheduler.begun(report)
        for index, cause in launched.errors.items():
            launched.requests[index].error = cause
        ended = self._now()
        report.launch_seconds = launched_at - scheduled
        report.commit_seconds = ended - launched_at
        result.launched.append(report)
        for see in self.observers.launched:
            see(launched)
        of_before = before.launched.report.rest_seconds if before else 0.0
        return _UnderWay(launched, step, ended - started - of_before, copies)

    def _collect(self, current: _UnderWay[LaunchedT], result: StepResult) -> None:
        launched, report = current.launched, current.launched.report
        started, rest_seconds = self._now(), report.rest_seconds
        try:
            report.choices = self.runner.collect(launched)
        except BaseException as error:
            later = self._under_way.step.everyone if self._under_way else []
            later += result.fault.requests if result.fault else []  # of a launch that failed
            result.fault = Fault(list(dict.fromkeys(current.step.everyone + later)), error)
            return
        waited = self._now()
        report.wait_seconds = waited - started
        report.seconds = current.seconds + rest_seconds + report.wait_seconds
        result.report = report
        if current.copies:
            try:
                self._put(current.copies)
            except Exception as error:  # of the copies; the step itself is right
                later = self._under_way.step.everyone if self._under_way else []
                result.fault = result.fault or Fault(later, error)
        self._scheduler.settle(report)
        if self._scheduler.gives_several:
            self._last = {choice.request.id: choice for choice in report.choices}
        report.settle_seconds = self._now() - waited
        for see in self.observers.settled:
            see(launched)

    def _now(self) -> float:
        """Seconds without the garbage collector's."""
        return self._pauses.clock() - self._pauses.seconds

    def rest(self) -> bool:
        """There is nothing to compute at present. Returns whether something failed."""
        result = StepResult()
        if self.busy or self._paused(self.pause.rest, result) or result.fault is None:
            return False
        self.recover(result.fault)
        return True

    def _paused(self, act: Callable[[], None], result: StepResult) -> bool:
        """Do what waits for a pause; returns whether nothing failed."""
        try:
            act()
        except Exception as error:  # of no request; any of the K/V may be wrong
            LOGGER.exception("what is done between steps has failed")
            result.fault = Fault([], error)
        return result.fault is None

    def copy_when_idle(self) -> bool:
        """Copy some blocks out of the pool, unless a step is under way; whether there are more."""
        if self.busy:
            return False
        stores = self._scheduler.copies_when_idle()
        try:
            if stores:
                self._put([_Copies(stores, self.runner.transfer(stores, ()))])
        except Exception as error:  # of no request; any of the K/V may be wrong
            self.recover(Fault([], error))
            return False
        return self._scheduler.has_more_copies()

    def _put(self, copies: Sequence[_Copies]) -> None:
        """Give the tier what has been copied."""
        for each in copies:
            if each.wait is not None:
                each.wait()
        for each in copies:
            self._scheduler.keep_copies(each.stores)
