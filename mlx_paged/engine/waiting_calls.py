"""Which outputs of an engine go to calls that wait for them, and to readers. Knows no mlx."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_paged.arguments import require
from mlx_paged.engine.one_thread import Occupancy
from mlx_paged.outputs import Completion, TokenOutput

OnOutput = Callable[[TokenOutput], None]


class Stepped(Protocol):
    """What a call that waits for requests needs of an engine."""

    occupancy: Occupancy

    def compute(self) -> None: ...
    def abort(self, request_id: int) -> Completion | None: ...


@dataclass(slots=True, eq=False)
class _Stream:
    """What a waiting call, or the reader of a stream, gets of the requests that it added.

    Attributes:
        outputs: that it has not read yet.
        completions: by request id, of requests that have ended.
    """

    outputs: deque[TokenOutput] = field(default_factory=deque)
    completions: dict[int, Completion] = field(default_factory=dict)


class Streams:
    """The outputs that waiting calls and readers of streams have not taken yet.

    Whichever call computes a step, each output goes to the call or the stream that added its
    request. :meth:`Engine.step` returns the outputs of all other requests. This object refers to no
    engine, so that an engine is freed with its last reference.

    Attributes:
        by_request: by request id, where the outputs of the request go.
        dropped: ids of the streams that have no reader any more.
    """

    def __init__(self) -> None:
        self.by_request: dict[int, _Stream] = {}
        self.dropped: deque[int] = deque()

    def __len__(self) -> int:
        """The number of requests whose outputs somebody waits for."""
        return len(self.by_request)

    def has_unread(self, request_id: int) -> bool:
        """Whether a request has outputs that its call or its reader has not taken yet."""
        stream = self.by_request.get(request_id)
        unread = () if stream is None else stream.outputs
        return any(output.request_id == request_id for output in unread)

    def note_aborted(self, request_id: int, completion: Completion) -> None:
        """Let the call that waits for an aborted request, or its reader, go on."""
        if request_id in self.by_request:
            self.by_request[request_id].completions[request_id] = completion

    def complete(
        self, engine: Stepped, added: Iterator[list[int]], on_output: OnOutput | None
    ) -> list[Completion]:
        """The completions of requests, in the order of their ids. Steps the engine until all of
        them have ended. An exception aborts them.

        Args:
            added: ids of requests; each item is added when it is asked for.
            on_output: called with every token.
        """
        is_callable = on_output is None or callable(on_output)
        require(is_callable, "generate", "on_output", on_output, "a callable or None")
        ids: list[int] = []
        stream = _Stream()
        try:
            for batch in added:
                ids += batch
                self.by_request |= dict.fromkeys(batch, stream)
            while stream.outputs or len(stream.completions) < len(ids):
                if not stream.outputs:
                    engine.compute()
                    continue
                output = stream.outputs.popleft()
                if output.completion is not None:
                    stream.completions[output.request_id] = output.completion
                if on_output is not None:
                    on_output(output)
            return [stream.completions[request_id] for request_id in ids]
        except BaseException:
            for request_id in ids:
                engine.abort(request_id)
            raise
        finally:
            for request_id in ids:
                self.by_request.pop(request_id, None)

    def read(
        self, engine: Stepped, request_id: int, abort_dropped: Callable[[], None]
    ) -> Generator[Any]:
        """First None, when the stream is ready; then the outputs of the request. The engine steps
        when the next output is not known yet.

        Args:
            abort_dropped: called when the stream has no reader any more and no thread is in the
                engine.
        """
        stream = self.by_request[request_id] = _Stream()
        try:
            yield
            while True:
                while stream.outputs:
                    output = stream.outputs.popleft()
                    yield output
                    if output.completion is not None:
                        return
                if stream.completions:  # aborted by another caller
                    return
                engine.compute()
        finally:
            self.dropped.append(request_id)
            # The garbage collector may run this inside any other call, in any thread. Then the
            # next step aborts the request.
            if engine.occupancy.thread is None:
                abort_dropped()

    def abort_dropped(self, engine: Stepped) -> None:
        """Abort the requests of streams that have no reader any more."""
        while self.dropped:
            request_id = self.dropped.popleft()
            engine.abort(request_id)
            self.by_request.pop(request_id, None)
