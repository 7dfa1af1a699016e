"""uvicorn's server with a limit of connections that counts, and a drain that ends."""

import argparse
import asyncio
import logging
import resource
import socket
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_paged.server import sockets, tickets
from mlx_paged.server.app import make_app
from mlx_paged.server.models import Models
from mlx_paged.server.sockets import BACKLOG

LOGGER = logging.getLogger(__name__)
FAREWELL_S = 5  # to tell clients that their answers were ended
KEEP_ALIVE_S = 30  # without a byte of a request
HEAD_S = 10.0  # from the first byte of a request's head to its last one
REST_S = 10.0  # for the rest of a body whose request is answered
WRITE_S = 30.0  # in which a client reads the buffers of its connection
SPARE_FILES = 64  # connections above the limit that get an answer, 503
ACCEPTED = 32  # connections at a time: asyncio accepts so many before it closes any of them
FREE_CHUNKS = 4096  # of a body, which may have any size
CHUNK_BYTES = 16  # that the chunks of a body with more of them have on average


class Parser(h11.Connection):
    """Refuses bodies of tiny chunks. Each chunk keeps the event loop busy for microseconds, and all
    that one read of the socket brings come at once."""

    _num_chunks = _num_bytes = 0  # of the body

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > max(FREE_CHUNKS, self._num_bytes // CHUNK_BYTES):
                raise h11.RemoteProtocolError("the chunks are too small")
        return event


class Connection(H11Protocol):
    """Is closed if no request comes in time, if its head takes longer than HEAD_S, if the rest of a
    body that nobody reads takes longer than REST_S, if its client reads nothing for WRITE_S, or if
    too many others are open."""

    head_timer: asyncio.TimerHandle | None = None
    rest_timer: asyncio.TimerHandle | None = None
    unread_since: float | None = None  # when the client last read all, or a buffer of it

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = Parser(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > (self.limit_concurrency or 0) + SPARE_FILES:
            transport.abort()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        """uvicorn's timer ends with the first byte. This one ends with the head."""
        super().data_received(data)
        is_head = self.conn.their_state is h11.IDLE
        if is_head and self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)
        elif not is_head and self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless an answer has begun. What the application answers later
        goes nowhere: uvicorn would raise, in the application or in asyncio."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and self.rest_timer is None:
            self.rest_timer = self.loop.call_later(REST_S, self._end_rest)

    def _end_rest(self) -> None:
        self.rest_timer = None
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread_since = None

    def check_reader(self, now: float) -> None:
        """Close the connection if its client has read nothing for too long. This is called every
        second."""
        if not self.transport.get_write_buffer_size():
            self.unread_since = None
        elif self.unread_since is None:
            self.unread_since = now
        elif now - self.unread_since > WRITE_S:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.head_timer, self.rest_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """Answers requests that come to `listener`, a bound socket, once it runs. Its `address` is host
    and port, or the path of a Unix socket. Raises OSError if a file of TLS cannot be read."""

    def __init__(self, args: argparse.Namespace, models: Models, listener: socket.socket) -> None:
        self.models = models
        self._drain_s = args.drain_seconds
        self.app = make_app(args, models)
        config = uvicorn.Config(
            self.app,
            http=Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,  # request_log.py writes it
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPTED,
            limit_concurrency=_limit_files(args.max_connections),
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(args.drain_seconds) + FAREWELL_S,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
            loop="auto" if args.uds is None else "asyncio",  # uvloop takes sockets of ports only
        )
        config.load()
        super().__init__(config)
        self.listener = listener
        self.address = sockets.address_of(self.listener)
        self.url = sockets.url_of(self.listener, "https" if args.ssl_certfile else "http")

    def run(self, sockets: Any = None) -> None:
        """Answer requests until a signal comes or `should_exit` is set, then drain."""
        serving = self.serve([self.listener])
        try:
            with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
                runner.run(serving)
        finally:
            serving.close()  # a signal may come before it has begun

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listener.listen(BACKLOG)  # asyncio has set it to ACCEPTED

    async def on_tick(self, counter: int) -> bool:
        """Close connections whose clients do not read. uvicorn calls this ten times a second."""
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                assert isinstance(connection, Connection)
                connection.check_reader(now)
            tickets.end_unread(self.app.state.open_tickets)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second SIGINT closes all connections: uvicorn would wait for them."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            self.app.state.forced = True
            loop = asyncio.get_running_loop()
            for connection in list(self.server_state.connections):
                loop.call_soon_threadsafe(connection.transport.abort)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish open answers; when the time to drain is over, end them with an error."""
        if count := len(self.server_state.tasks):
            text = "open answers: %d; in %g s they end with an error; a second Ctrl-C ends them now"
            LOGGER.info(text, count, self._drain_s)
        loop = asyncio.get_running_loop()
        loop.call_later(self._drain_s, loop.run_in_executor, None, self.models.close)
        await super().shutdown(sockets)
        if self.force_exit:  # a second signal: uvicorn ends the application without a word
            await self.lifespan.shutdown()


def _limit_files(connections: int) -> int:
    """Raise the limit of open files so far that connections fit. Returns how many fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 4 * SPARE_FILES
    if 0 <= soft < wanted:  # -1 is no limit
        soft = wanted if hard < 0 else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft < 0 else min(connections, soft - 4 * SPARE_FILES)
