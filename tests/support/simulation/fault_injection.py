"""Failures on purpose: of steps, of single requests, of their processors, and Ctrl-C."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_paged.request import Request
from mlx_paged.scheduler.step import Runner, SampledToken, Step


class InjectedError(RuntimeError):
    """Raised on purpose."""


class DeviceError(InjectedError):
    """Raised by a launch because the device failed, perhaps in the step before."""


@dataclass(frozen=True)
class FailingProcessor:
    """A logits processor that raises as soon as there are `length` tokens, prompt included."""

    length: int

    def __call__(self, tokens: Any, logits: Any) -> Any:
        if len(tokens) >= self.length:
            raise InjectedError(f"a processor fails at {len(tokens)} tokens")
        return logits


@dataclass(slots=True, eq=False)
class _UnderWay:
    step: Step
    launched: Any
    error: BaseException | None  # to be raised when the step is collected


@dataclass(eq=False)
class FaultyRunner:
    """A runner that fails now and then.

    Attributes:
        rate: probability that a step fails for no reason.
        bad: by request id, the number of its tokens from which on every step with it fails.
        num_raised: failures so far, Ctrl-C included.
        took_part: by request id, failed steps that it was in.
        alone: requests that were the only one in a failed step.
        beams_failed: whether a beam search was in a failed step.
        on_launch: called with every step.
        is_beam: whether a request of this id is a hypothesis of a beam search.
    """

    inner: Runner[Any]
    rng: random.Random
    rate: float = 0.0
    bad: dict[int, int] = field(default_factory=dict)
    num_raised: int = 0
    took_part: Counter[int] = field(default_factory=Counter)
    alone: set[int] = field(default_factory=set)
    beams_failed: bool = False
    on_launch: Callable[[Step], None] = lambda step: None
    is_beam: Callable[[int], bool] = lambda request_id: False

    def __post_init__(self) -> None:
        self._under_way: list[_UnderWay] = []
        self._has_raised = False
        self._device_error: Exception | None = None

    def launch(self, step: Step, before: Any) -> Any:
        self.on_launch(step)
        error = self._error(step)
        where = self.rng.choice(("before", "after", "collect"))
        if isinstance(error, DeviceError):
            self._device_error = error
            self._raise(
                error, [r for u in self._under_way for r in u.step.everyone] + step.everyone
            )
        if error is not None and where == "before":
            self._raise(error, step.everyone)
        launched = self.inner.launch(step, before)
        if error is not None and where == "after":
            self._raise(error, step.everyone)
        self._under_way.append(_UnderWay(step, launched, error))
        return launched

    def collect(self, launched: Any) -> list[SampledToken]:
        if self._device_error is not None:  # raised before: no step under way can be trusted
            raise self._device_error
        (current,) = (u for u in self._under_way if u.launched is launched)
        if current.error is not None:
            self._raise(current.error, [r for u in self._under_way for r in u.step.everyone])
        self._under_way.remove(current)
        return self.inner.collect(launched)

    def transfer(self, stores: Any, loads: Any) -> Any:
        return self.inner.transfer(stores, loads)

    def release(self, state_ids: Sequence[int], rested: Sequence[int] = ()) -> None:
        self.inner.release(state_ids, rested)

    def resize(self, num_blocks: int, kept: Any = None) -> None:
        assert not self._under_way, "the pool changes while a step is under way"
        self.inner.resize(num_blocks, kept)  # type: ignore[attr-defined]

    def recover(self, error: BaseException | None = None) -> None:
        assert self._has_raised, "a step failed that was not made to"
        self._has_raised, self._device_error = False, None
        self._under_way.clear()
        self.inner.recover()

    def _error(self, step: Step) -> BaseException | None:
        for request in step.everyone:
            if request.num_tokens >= self.bad.get(request.id, request.num_tokens + 1):
                return InjectedError(f"request {request.id} fails at {request.num_tokens} tokens")
        if self.rng.random() >= self.rate:
            return None
        failures = InjectedError("a step fails"), KeyboardInterrupt(), DeviceError("the GPU fails")
        return self.rng.choice(failures)

    def _raise(self, error: BaseException, requests: list[Request]) -> None:
        self.num_raised += 1
        self._has_raised = True
        if isinstance(error, Exception):
            ids = {request.id for request in requests}
            self.took_part.update(ids)
            self.alone |= ids if len(ids) == 1 else set()
            self.beams_failed |= any(map(self.is_beam, ids))
        raise error
