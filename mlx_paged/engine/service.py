"""EngineService: an engine on a thread of its own, used by any number of threads and tasks."""

import atexit
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

import mlx.core as mx

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.text import Prompt
from mlx_paged.engine.ticket import Inbox, Ticket
from mlx_paged.sampling_params import SamplingParams

T = TypeVar("T")


class EngineService:
    """Runs an engine on one thread; any number of threads submit, read and abort.

    MLX binds a computation to the thread that asked for it, and an engine is not locked: between
    :meth:`start` and :meth:`close` the engine belongs to the service, and :meth:`call` is the one
    way to touch it. What arrives during a step is handled after it, all of it before the next.
    With nothing to compute the thread sleeps.

    A context manager: entering starts the service, leaving closes it without draining.

    Args:
        engine: whose model holds no array that is yet to be computed: only the thread that made
            such an array can compute it. Requests that it has already are computed, unheard.
        max_unread: outputs that may wait for their reader. One more aborts the request, except
            where the reader waits for :meth:`Ticket.result`.

    Attributes:
        error: what :meth:`Engine.step` raised; the service is closed then. None while all is well.

    Raises:
        ValueError: `max_unread` below 1.
    """

    def __init__(self, engine: Engine, *, max_unread: int = 4096) -> None:
        if max_unread < 1:
            raise ValueError(f"[EngineService] max_unread is {max_unread}: expected >= 1")
        self.error: BaseException | None = None
        self._engine = engine
        self._max_unread = max_unread
        self._thread = threading.Thread(
            target=self._run, name="mlx_paged.engine.service", daemon=True
        )
        self._lock = threading.Lock()  # guards what is accepted: _started, _closed, _drain
        self._started = False
        self._closed = False
        self._drain = True
        self._open: dict[int, Inbox] = {}  # by request id; touched by the engine's thread only
        # Putting into a SimpleQueue takes no lock of Python's, so that a ticket may be collected,
        # and thereby aborted, at any moment in any thread.
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()

    def start(self) -> Self:
        """Start the engine's thread.

        Raises:
            RuntimeError: it was started or closed before.
        """
        with self._lock:
            if self._started or self._closed:
                raise RuntimeError(
                    "[EngineService] started before or closed: expected a new service"
                )
            self._started = True
            atexit.register(self.close)  # no thread may be inside MLX when the process exits
            self._thread.start()
        return self

    def close(self, drain: bool = False) -> None:
        """Accept nothing more, end what is open and wait for the thread to end.

        Args:
            drain: finish every request; else those with a ticket end with ``FinishReason.ABORT``
                and others stay in the engine.
        """
        with self._lock:
            self._closed = True
            self._drain = self._drain and drain
        if not self._started or threading.current_thread() is self._thread:
            return
        self._calls.put(_Call(_nothing))
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """Whether it takes requests: started, and neither closed nor failed."""
        return self._started and not self._closed

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Ticket:
        """Add a request: :meth:`Engine.add_request` on the engine's thread.

        Waits for the step under way; in asyncio, ``await asyncio.to_thread(service.submit, ...)``
        keeps the loop free meanwhile.

        Raises:
            ValueError: as :meth:`Engine.add_request`.
            RuntimeError: the service is not running; from :attr:`error` if that is why.
        """
        return self.adopt(lambda engine: [engine.add_request(prompt, params, **options)])[0]

    def adopt(self, add: Callable[[Engine], Sequence[int]]) -> list[Ticket]:
        """Tickets for the requests whose ids `add` returns, run as by :meth:`call`: for all that
        an engine can add, e.g. ``service.adopt(lambda engine: [engine.fork(request_id)])``.

        Raises:
            ValueError: a request has a ticket already.
            Exception: as :meth:`call`.
        """
        return self.call(lambda engine: [self._ticket(request_id) for request_id in add(engine)])

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run ``function(engine)`` on the engine's thread between two steps; return its value.

        It must not step the engine nor abort a request that has a ticket: the readers would miss
        it. Arrays that it returns have to be evaluated.

        Raises:
            RuntimeError: the service is not running; from :attr:`error` if that is why.
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

    def _refusal(self) -> RuntimeError:
        state = "failed" if self.error else "closed" if self._closed else "not started"
        return RuntimeError(f"[EngineService] the service is {state}: expected a running one")

    def _abort_soon(self, request_id: int) -> None:
        self._calls.put(_Call(lambda engine: self._abort(request_id)))

    # On the engine's thread

    def _run(self) -> None:
        try:
            while self._goes_on():
                self._answer_calls()
                self._step()
            self._abort_all()
        except BaseException as error:
            self._fail(error)
        while not self._calls.empty():  # no more can come: the service is closed
            self._calls.get().refuse(self._refusal(), self.error)
        atexit.unregister(self.close)
        mx.clear_streams()  # else they die with the thread, after `join`: exiting then crashes

    def _goes_on(self) -> bool:
        return not self._closed or (self._drain and self._engine.has_work)

    def _answer_calls(self) -> None:
        """Everything asked for since the last step; sleeps while there is nothing to do."""
        if not self._engine.has_work:
            self._calls.get().answer(self._engine)
        for _ in range(self._calls.qsize()):  # what comes meanwhile waits: a step is due
            self._calls.get().answer(self._engine)

    def _step(self) -> None:
        """Compute a step if there is anything to compute, and hand out what it gives."""
        if not self._engine.has_work:
            return
        for output in self._engine.step():
            inbox = self._open.get(output.request_id)
            if inbox is None:
                continue
            has_room = inbox.put(output)
            if output.completion is not None:
                del self._open[output.request_id]
            elif not has_room:
                self._abort(output.request_id)

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
        if completion is not None:  # else it has ended, and the next step hands out its completion
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
            with suppress(Exception):  # the engine may be beyond that; its first error counts
                self._engine.abort(request_id)
            inbox.end(error)


@dataclass(slots=True)
class _Call(Generic[T]):
    """Something to be run on the engine's thread, and where its value goes."""

    function: Callable[[Engine], T]
    reply: Future[T] = field(default_factory=Future)

    def answer(self, engine: Engine) -> None:
        try:
            value = self.function(engine)
        except BaseException as error:
            self.reply.set_exception(error)
        else:
            self.reply.set_result(value)

    def refuse(self, refusal: RuntimeError, cause: BaseException | None) -> None:
        refusal.__cause__ = cause
        self.reply.set_exception(refusal)


def _nothing(engine: Engine) -> None:
    pass
