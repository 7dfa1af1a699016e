"""EngineService: runs an engine on its own thread, for any number of threads and tasks."""

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, Self, TypeVar

import mlx.core as mx

from mlx_paged.arguments import integer, require
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.text import PromptLike
from mlx_paged.engine.ticket import Change, Inbox, Ticket, wake
from mlx_paged.sampling_params import CONSTRAINTS, SamplingParams
from mlx_paged.scheduler.step import DeviceError

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

MOST_DEVICE_FAULTS = 10
"""A service fails after so many steps that the device failed in, without a token between them."""

LOOK_EVERY_S = 5.0
"""Seconds after which an engine without work looks at the system's memory."""

_idle_streams: list[mx.Stream] = []  # of services that have ended


class EngineService:
    """Runs an engine on one thread; any number of threads submit, read and abort.

    MLX binds a computation to the thread that asked for it, and an engine takes one thread at a
    time. So between :meth:`start` and :meth:`close` only the service's thread uses the engine;
    :meth:`call` runs a function on it. Calls that arrive during a step run after this step and
    before the next one. The thread sleeps while there is nothing to compute.

    A context manager, also of ``async with``: entering starts the service, leaving closes it
    without draining.

    Args:
        engine: every array of its model must be evaluated, because only the thread that made an
            array can compute it. Requests that it has already are computed without a reader.
        max_unread: outputs that may wait for their reader. One more output aborts the request,
            unless the reader waits for :meth:`Ticket.result`.

    Attributes:
        error: what :meth:`Engine.step` raised, which closed the service; None if it raised nothing.

    Raises:
        ValueError: `engine` is no engine, or `max_unread` is below 1.
    """

    def __init__(self, engine: Engine, *, max_unread: int = 4096) -> None:
        is_engine = isinstance(engine, Engine)
        require(is_engine, "EngineService", "engine", engine, "an Engine")
        max_unread = integer("EngineService", "max_unread", max_unread, 1)
        self.error: BaseException | None = None
        self._engine = engine
        self._max_unread = max_unread
        name = "mlx_paged.engine.service"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._begun = Future[None]()
        self._lock = threading.Lock()  # guards _started, _closed, _drain and what enters _calls
        self._started = False
        self._closed = False
        self._drain = True
        self._open: dict[int, Inbox] = {}  # by request id; touched by the engine's thread only
        # The garbage collector may abort a ticket at any moment in any thread. SimpleQueue.put can
        # be called even then: it is reentrant.
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()

    def start(self) -> Self:
        """Start the engine's thread.

        Raises:
            RuntimeError: it was started or closed before, or another thread or service uses the
                engine.
        """
        with self._lock:
            if self._thread.ident is not None or self._closed:
                raise RuntimeError(
                    "[EngineService] started before or closed: expected a new service"
                )
            if self._engine.occupancy.thread is None:
                self._engine.settle()
            self._thread.start()
            self._begun.result()
            self._started = True
            self._listeners = self._engine._processes.listeners
            self._listeners.append(self._fail)
            atexit.register(self.close)  # no thread may be inside MLX when the process exits
        return self

    def close(self, drain: bool = False) -> None:
        """Take no more requests, end those that are open and wait for the thread to end.

        Args:
            drain: finish every request. Otherwise requests with a ticket end with
                ``FinishReason.ABORT``, and others stay in the engine.
        """
        with self._lock:
            self._closed = True
            self._drain = self._drain and drain
        if not self._started or threading.current_thread() is self._thread:
            return
        self._calls.put(_Call(lambda engine: None))  # wakes the thread
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """Whether the service takes requests: it was started, was not closed, and did not fail."""
        return self._started and not self._closed

    def submit(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any
    ) -> Ticket:
        """Add a request: :meth:`Engine.add_request` on the engine's thread.

        This waits for the step under way. In asyncio, ``await asyncio.to_thread(service.submit,
        ...)`` keeps the loop free meanwhile.

        Raises:
            ValueError: as :meth:`Engine.add_request`.
            RuntimeError: the service is not running; :attr:`error` is its cause, if there is one.
        """
        names = {name: value for name, value in options.items() if name in CONSTRAINTS}
        self.compile(SamplingParams(**names) if params is None else params)
        self.prepare_adapter(options.get("adapter") if params is None else params.adapter)
        return self.adopt(lambda engine: [engine.add_request(prompt, params, **options)])[0]

    def compile(self, params: SamplingParams) -> None:
        """Compile what constrains the text of `params`, if anything does, in this thread. Then
        requests that are added with it do not delay others, which they otherwise do for seconds at
        most.

        Raises:
            ValueError: the constraint cannot be compiled.
        """
        if isinstance(params, SamplingParams) and params.constraint is not None:
            self._engine.constraints.compile(params)

    def has_compiled(self, params: SamplingParams) -> bool:
        """Whether :meth:`compile` has nothing to do."""
        return params.constraint is None or self._engine.constraints.knows(params)

    def prepare_adapter(self, name: str | None) -> None:
        """Read the adapter with this name in this thread, unless it is in memory; None: none. Then
        requests that are added with it do not delay others.

        Raises:
            ValueError: the adapter's files have changed since it was loaded, or cannot be read.
        """
        if isinstance(name, str) and name in self._engine.adapters:
            self._engine.prepare_adapter(name)

    def adopt(self, add: Callable[[Engine], Sequence[int]]) -> list[Ticket]:
        """Run `add` as :meth:`call` does; return a ticket for each request id that it returns.

        This adds any kind of request: ``service.adopt(lambda engine: [engine.fork(request_id)])``.

        Raises:
            ValueError: a request has a ticket already.
            Exception: as :meth:`call`.
        """
        return self.call(lambda engine: [self._ticket(request_id) for request_id in add(engine)])

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run ``function(engine)`` on the engine's thread between two steps; return its value.

        The function must not step the engine or abort a request that has a ticket: the ticket's
        reader would not see it. Arrays that it returns must be evaluated.

        Raises:
            RuntimeError: the service is not running; :attr:`error` is its cause, if there is one.
            Exception: whatever `function` raises.
        """
        if threading.current_thread() is self._thread:
            return function(self._engine)
        call = _Call(function)
        with self._lock:
            if not self.is_running:
                raise self._refusal() from self.error
            self._calls.put(call)
        return call.reply.result()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self.start()

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.close)  # it waits for the step under way

    def _refusal(self) -> RuntimeError:
        state = "failed" if self.error else "closed" if self._closed else "not started"
        return RuntimeError(f"[EngineService] the service is {state}: expected a running one")

    def _abort_soon(self, request_id: int) -> None:
        self._calls.put(_Call(lambda engine: self._abort(request_id)))

    # On the engine's thread

    def _run(self) -> None:
        with ExitStack() as kept:
            try:
                kept.enter_context(self._engine.occupancy.kept())
            except RuntimeError as refusal:
                self._begun.set_exception(refusal)
                return
            kept.enter_context(_stream_on_cpu())
            self._begun.set_result(None)
            self._serve()
        mx.clear_streams()  # else the thread frees them after `join`, and the process may crash

    def _serve(self) -> None:
        try:
            if self._engine.prewarm is not False:
                try:
                    self._engine.warm_up()
                except DeviceError:  # perhaps of another engine's work; the first step recovers
                    LOGGER.exception("the GPU failed while kernels were compiled")
            while not self._closed or (self._drain and self._engine.has_work):
                self._answer_calls()
                self._step()
            self._abort_all()
            if self.error is None:
                self._engine.settle()
        except BaseException as error:
            self._fail(error)
        self._refuse_calls()
        atexit.unregister(self.close)
        with self._lock:  # after `start`
            self._listeners.remove(self._fail)

    def _answer_calls(self) -> None:
        """Answer all calls since the last step; without work, sleep until the next call, or until
        the system's memory is to be looked at."""
        while self._calls.empty() and self._engine.copy_when_idle():
            pass
        if not self._engine.has_work:
            is_watched = self._engine.stats.pressure is not None
            with suppress(Empty):
                self._calls.get(timeout=LOOK_EVERY_S if is_watched else None).answer(self._engine)
        with suppress(Empty):  # an error of the engine may have refused the others
            for _ in range(self._calls.qsize()):  # those that come meanwhile wait for the next step
                self._calls.get_nowait().answer(self._engine)

    def _step(self) -> None:
        """Compute a step, if there is work, and give each output to its reader."""
        if not self._engine.has_work:
            return
        waiting = list[Change]()
        for output in self._engine.step():
            inbox = self._open.get(output.request_id)
            if inbox is None:
                continue
            has_room = inbox.put(output, waiting)
            if output.completion is not None:
                del self._open[output.request_id]
            elif not has_room:
                self._abort(output.request_id)
        wake(waiting)
        if self._engine.device_faults >= MOST_DEVICE_FAULTS:
            failed = f"failed in {self._engine.device_faults} steps without a token between them"
            raise DeviceError(f"[EngineService] the device {failed}: expected a working one")

    def _ticket(self, request_id: int) -> Ticket:
        if request_id in self._open:
            raise ValueError(
                f"[EngineService] request {request_id} has a ticket: expected another request"
            )
        inbox = self._open[request_id] = Inbox(self._max_unread)
        return Ticket(request_id, inbox, self._abort_soon)

    def _abort(self, request_id: int) -> None:
        if request_id not in self._open:
            return
        try:
            completion = self._engine.abort(request_id)
        except BaseException as error:
            self._fail(error)
            return
        if completion is not None:  # else it has ended, and the next step returns its completion
            self._open.pop(request_id).end(completion)

    def _abort_all(self) -> None:
        for request_id in list(self._open):
            self._abort(request_id)
        for request_id, inbox in self._open.items():
            inbox.end(RuntimeError(f"[EngineService] request {request_id} was ended by a call"))
        self._open.clear()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = error
            self._closed = True
        while self._open:
            request_id, inbox = self._open.popitem()
            with suppress(Exception):  # the engine may fail again; its first error counts
                self._engine.abort(request_id)
            inbox.end(error)
        self._refuse_calls()

    def _refuse_calls(self) -> None:
        """Refuse what is left; no more can come, because the service is closed."""
        with suppress(Empty):  # another thread may take some, too
            while True:
                call, refusal = self._calls.get_nowait(), self._refusal()
                refusal.__cause__ = self.error
                call.reply.set_exception(refusal)


@dataclass(slots=True)
class _Call(Generic[T]):
    """A function to run on the engine's thread, and the future of its value."""

    function: Callable[[Engine], T]
    reply: Future[T] = field(default_factory=Future)

    def answer(self, engine: Engine) -> None:
        try:
            self.reply.set_result(self.function(engine))
        except BaseException as error:
            self.reply.set_exception(error)


@contextmanager
def _stream_on_cpu() -> Iterator[None]:
    """On a CPU let this thread compute on a stream that no running service uses: MLX starts a
    thread for each stream and never ends it."""
    if mx.default_device() != mx.cpu:
        yield
        return
    try:
        stream = _idle_streams.pop()
    except IndexError:
        stream = mx.new_thread_unsafe_stream(mx.cpu)
    mx.set_default_stream(stream)
    try:
        yield
    finally:
        _idle_streams.append(stream)
