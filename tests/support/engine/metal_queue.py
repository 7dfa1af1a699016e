"""A Metal queue as MLX's sources show it, for engines that compute on a CPU.

mlx/backend/metal/device.cpp, event.cpp and array.cpp of 0.32.2 to 0.32.4:

- A command buffer signals its events when its commands end. Its completion handler runs later, and
  handlers run in the order of the buffers. A handler notes a failure in its encoder's error.
- To open an encoder raises that error once, and clears it.
- ``eval`` and ``async_eval`` commit buffers of their own.
- ``array::wait`` waits for the event, not for the handler. If the handler has run by then,
  ``array::is_available`` raises the error and clears it.
- ``CommandEncoder::synchronize`` waits until all handlers have run, then raises the error.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.kv.pool import as_int32
from mlx_paged.runner.device_errors import telling_errors
from mlx_paged.runner.model_runner import LaunchedStep, ModelRunner
from mlx_paged.scheduler.step import DeviceError, Step
from tests.support.engine.begun import has_begun
from tests.support.models.tiny_models import VOCAB

MESSAGE = "[METAL] Command buffer execution failed: planted."
BUFFERS = 3  # that the work of a step fills


class MetalQueue:
    """Fails once, in one command buffer of one launch: its tokens are wrong, its K/V is garbage.

    Args:
        at: which launch fails.
        buffer: which of its buffers.
        seed: decides how late handlers run, and whether a step that is held back fails in its first
            layers or in the rest.
        others_wait: whether other engines may wait, and be told, before the one that waits is.

    Attributes:
        launches: how many steps were launched.
        failures: command buffers that failed.
        told: how often an error was raised.
        handlers_are_late: whether handlers run only where all buffers are waited for.
    """

    def __init__(self, at: int, buffer: int, seed: int, others_wait: bool = False) -> None:
        self.failures = self.told = 0
        self.handlers_are_late = False
        self._others_wait = others_wait
        self._at, self._buffer = at, buffer
        self._random = Random(seed)
        self._buffers: list[bool] = []  # whether each of those that were committed failed
        self._num_handled = 0
        self._error: str | None = None
        self.launches = 0
        self._fails_next = False
        self._rest: list[mx.array] = []  # of a step that fails in what has not begun yet

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let engines run on this queue."""
        launch = ModelRunner.launch

        def launched(runner: ModelRunner, step: Step, before: LaunchedStep | None) -> LaunchedStep:
            return self._launched(runner, step, launch(runner, step, before))

        monkeypatch.setattr(ModelRunner, "launch", launched)
        monkeypatch.setattr(mx, "async_eval", self._encoding(mx.async_eval))
        monkeypatch.setattr(mx, "eval", self._waiting(mx.eval))
        monkeypatch.setattr(mx, "synchronize", self._synchronized(mx.synchronize))
        monkeypatch.setattr(ops.metal, "end_of_work", self.end_of_work)

    def fail_next(self) -> None:
        """Let the work fail that is given next, whoever gives it."""
        self._fails_next = True

    def end_of_work(self) -> Callable[[], None]:
        """As ``csrc/metal/encode.cpp``."""
        self._buffers.append(False)
        count = len(self._buffers)

        def wait() -> None:
            self._let_others_wait()
            self._handle(count)
            self._check()

        return wait

    def _let_others_wait(self) -> None:
        """Wait as Python's collector does, which closes an engine at any moment."""
        if self._others_wait and self._random.random() < 0.5:
            with suppress(DeviceError), telling_errors():
                mx.synchronize()

    def _launched(self, runner: ModelRunner, step: Step, launched: LaunchedStep) -> LaunchedStep:
        self.launches += bool(step.spans)
        if not step.spans or self.launches != self._at:
            return launched
        spoil(runner, step)
        if launched.held is None:
            # The last buffers are those of the step's own work and the one that marks its end.
            self._fail(-1 - BUFFERS + self._buffer)
        elif self._random.random() < 0.5:
            self._fail(-BUFFERS + self._buffer)
        else:
            self._rest = [array for array in launched.pending if not has_begun(array)]
        if launched.sampled is not None:  # in place: the runner has the same object
            wrong = (launched.sampled.tokens + 1) % VOCAB
            launched.sampled = replace(launched.sampled, tokens=wrong)
        return launched

    def _fail(self, index: int) -> None:
        assert index + len(self._buffers) >= self._num_handled, "its handler has run"
        self._buffers[index] = True
        self.failures += 1

    def _commit(self) -> None:
        """Commit the buffers of an eval."""
        self._buffers += [False] * BUFFERS
        if self._fails_next:
            self._fail(-1)
            self._fails_next = False
        if any(map(has_begun, self._rest)):
            self._fail(-BUFFERS + self._buffer)
            self._rest = []

    def _encoding(self, function: Callable[..., None]) -> Callable[..., None]:
        def encode(*args: Any) -> None:
            self._handle(self._random.randint(self._num_handled, self._most_handled()))
            self._check()
            function(*args)
            self._commit()

        return encode

    def _waiting(self, function: Callable[..., None]) -> Callable[..., None]:
        def wait(*args: Any) -> None:
            function(*args)
            self._commit()
            self._let_others_wait()
            self._handle(self._random.randint(self._num_handled, self._most_handled()))
            self._check()

        return wait

    def _synchronized(self, function: Callable[..., None]) -> Callable[..., None]:
        def synchronize(*args: Any) -> None:
            function(*args)
            self._handle(len(self._buffers))
            self._check()

        return synchronize

    def _most_handled(self) -> int:
        return self._num_handled if self.handlers_are_late else len(self._buffers)

    def _handle(self, count: int) -> None:
        """Run the handlers of the first `count` buffers, as far as they have not run yet."""
        for has_failed in self._buffers[self._num_handled : count]:
            if has_failed and self._error is None:
                self._error = MESSAGE
        self._num_handled = max(self._num_handled, count)

    def _check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            self.told += 1
            raise RuntimeError(error)


def spoil(runner: ModelRunner, step: Step) -> None:
    """Write garbage to every slot of the blocks that a step's requests hold."""
    pool, allocator = runner.pool, runner.allocator
    for layer, shape in enumerate(pool.shapes):
        size = pool.k[layer].shape[2]
        blocks = np.unique(np.concatenate([allocator.table(s.request.id) for s in step.spans]))
        slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        rows = [
            mx.full((slots.size, shape.n_kv_heads, dim), 3.0, shape.dtype) for dim in shape.row_dims
        ]
        pool.write(layer, *rows, as_int32(slots.astype(np.int32)))
