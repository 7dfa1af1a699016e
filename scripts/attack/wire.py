"""One exchange with a server over a socket of its own, and whether its answer may be given."""

import json
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any

REFUSED = range(400, 500)
ANSWERED = (200,)
BUSY = 503
SHOWN = 1500  # bytes of a request that a finding shows
CONNECT_S = 20.0


@dataclass(frozen=True)
class Request:
    """Bytes for a server, and what it may answer.

    Attributes:
        wanted: statuses of a right answer; empty: every one below 500. 503 with Retry-After is
            always right.
        is_http: an answer must come, and it must be JSON or events.
        patience: seconds for the whole answer; later it is a finding.
        may_leave: after `patience` the client leaves, and that is no finding.
    """

    raw: bytes
    wanted: Collection[int] = ()
    is_http: bool = True
    patience: float = 60.0
    may_leave: bool = False

    def shown(self) -> str:
        """The request as bytes of Python, shortened in the middle."""
        half = SHOWN // 2
        if len(self.raw) <= SHOWN:
            return repr(self.raw)
        return f"{self.raw[:half]!r} ... {len(self.raw)} bytes ... {self.raw[-half:]!r}"


@dataclass
class Reply:
    """What came back: status 0 if nothing did."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0
    error: str = ""


def post(path: str, body: Any, key: str, *headers: str, method: str = "POST") -> bytes:
    """A request of HTTP/1.1; `body` is bytes, or becomes JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {key}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\nConnection: close\r\n\r\n" + content


def get(path: str, *headers: str, host: str = "127.0.0.1", method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "Connection: close"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=CONNECT_S)


def exchange(port: int, request: Request) -> Reply:
    """Send a request and read its answer to the end, for `patience` seconds."""
    started, reply = time.monotonic(), Reply()
    timer = threading.Timer(request.patience, lambda: None)
    try:
        with connected(port) as wire:
            timer = threading.Timer(request.patience, _end, (wire,))
            timer.daemon = True
            timer.start()
            wire.settimeout(request.patience)
            with suppress(BrokenPipeError, ConnectionResetError):  # an early answer is read
                wire.sendall(request.raw)
            answer = HTTPResponse(wire)
            answer.begin()
            reply.status = answer.status
            reply.headers = {name.lower(): value for name, value in answer.getheaders()}
            reply.body = answer.read()
    except (OSError, HTTPException) as error:
        reply.error = f"{type(error).__name__}: {error}"
    timer.cancel()
    reply.seconds = time.monotonic() - started
    if reply.seconds >= request.patience:
        reply.error = f"no whole answer within {request.patience:g} s"
    return reply


def _end(wire: socket.socket) -> None:
    with suppress(OSError):
        wire.shutdown(socket.SHUT_RDWR)


def complaint(request: Request, reply: Reply) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if reply.error or not reply.status:
        is_left = request.may_leave and reply.seconds >= request.patience
        is_closed = not request.is_http and reply.seconds < request.patience
        return "" if is_left or is_closed else reply.error or "no answer"
    if reply.status == BUSY and reply.headers.get("retry-after", "").isdecimal():
        return _of_body(reply)
    if reply.status >= 500:
        return f"status {reply.status} {reply.body[:200]!r}"
    if request.wanted and reply.status not in request.wanted:
        wanted = "a refusal" if request.wanted == REFUSED else str(sorted(request.wanted))
        return f"status {reply.status}: expected {wanted}; {reply.body[:200]!r}"
    return _of_body(reply) if request.is_http else ""


def _of_body(reply: Reply) -> str:
    kind = reply.headers.get("content-type", "").partition(";")[0]
    try:
        if kind == "text/event-stream":
            list(events(reply.body))
        elif kind == "application/json":
            content = strict(reply.body)
            if reply.status >= 400 and not content["error"]["message"]:
                return f"status {reply.status} without a message"
        elif reply.status >= 400:
            return f"status {reply.status} of the type {kind!r}: {reply.body[:200]!r}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{kind}: {error!s:.200} in {reply.body[:200]!r}"
    return ""


def strict(text: bytes) -> Any:
    """What JSON of the standard says. Raises ValueError for all else, and for half a character."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    content = json.loads(text.decode(), parse_constant=refuse)
    json.dumps(content, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return content


def events(body: bytes) -> Iterator[Any]:
    """What the events of a stream say. Raises ValueError for a line that is none of
    server-sent events, for a stream without an end, and for one that goes on after it."""
    is_ended = False
    *blocks, rest = body.decode().split("\n\n")
    if rest:
        raise ValueError(f"the stream ends within an event: {rest[-80:]!r}")
    for block in blocks:
        for line in block.split("\n"):
            name, colon, value = line.partition(":")
            if name not in ("", "event", "data") or not colon:
                raise ValueError(f"a line of a stream: {line[:80]!r}")
            if name != "data":
                continue
            if is_ended:
                raise ValueError(f"an event after the last one: {line[:80]!r}")
            is_ended = value.strip() == "[DONE]"
            if not is_ended:
                content = strict(value.encode())
                is_ended = _is_last(content)
                yield content
    if not is_ended:
        raise ValueError(f"no last event, but {body[-200:]!r}")


LAST = {"message_stop", "error", "response.completed", "response.incomplete", "response.failed"}


def _is_last(event: Any) -> bool:
    """Whether a stream of another form than OpenAI's first ends with this event."""
    return event.get("type") in LAST or ("error" in event and "choices" not in event)
