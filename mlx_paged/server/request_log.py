"""One line of the log for each request, when it ends."""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.server.computed import Computed
from mlx_paged.server.log_format import REQUEST_ID, printable

LOGGER = logging.getLogger(__name__)

GONE = 499  # as proxies write it: the client did not wait for its answer
LONGEST_ID = 128
GOT = ", got "  # what follows in a refusal is the client's: it may be text of a prompt
POLLED = {"/health", "/ready", "/metrics", "/status", "/v1/cache"}
"""Paths that are asked again and again: their good answers are logged at the level DEBUG."""


@dataclass
class Record:
    """What is known of a request. Times are those of ``time.monotonic``."""

    id: str
    path: str  # without the one under which a proxy serves
    begun: float
    ended: float = 0.0
    computed: Computed | None = None  # if it came to a completion
    status: int = GONE
    reason: str = ""  # of a refusal or a failure
    parts: list[str] = field(default_factory=list)  # what else the line tells


Observer = Callable[[Scope, Record], None]
"""Is told of each request that has ended."""


def record_of(scope: Scope) -> Record:
    """The record of a request that :func:`logged` has begun."""
    record: Record = scope["state"]["record"]
    return record


def logged(inner: ASGIApp, observers: Sequence[Observer] = ()) -> ASGIApp:
    """Middleware that gives each request its id, the client's own in `X-Request-Id` if it may be
    one, writes its line, and tells the observers."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await inner(scope, receive, send)
            return
        given = Request(scope).headers.get("x-request-id", "")
        is_good = given.isascii() and given.isprintable() and 0 < len(given) <= LONGEST_ID
        own_id = given if is_good else uuid.uuid4().hex
        record = Record(own_id, scope["path"], time.monotonic())
        scope.setdefault("state", {})["record"] = record
        REQUEST_ID.set(record.id)  # each request has a task, and so a context, of its own
        names = (b"x-request-id", b"request-id")  # for clients of OpenAI and of Anthropic

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                own = [(name, record.id.encode()) for name in names]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            await inner(scope, receive, marked)
        except Exception:
            record.status = 500
            raise
        finally:
            record.ended = time.monotonic()
            told = " ".join(record.reason.split()).partition(GOT)[0]
            reason = printable(told)[:500]
            parts = [reason] if reason else []
            parts += [*record.parts, f"{record.ended - record.begun:.3f} s", f"id {record.id}"]
            is_routine = scope["path"] in POLLED and record.status == 200
            level = logging.DEBUG if is_routine else logging.INFO
            LOGGER.log(
                level,
                "%s %.80r: %d, %s",
                scope["method"],
                scope["path"],
                record.status,
                ", ".join(parts),
            )
            for observe in observers:
                observe(scope, record)

    return answer
