"""Harm that connections do rather than requests: each kind opens some, and leaves them open."""

import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from scripts.attack.kinds import CHAT, COMPLETIONS, RESPONSES, Target
from scripts.attack.wire import connected, post

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST
HELD = 8 << 20  # bytes of each of the bodies and answers that are not read
MANY = 300
INODE = 9  # column of /proc/net/tcp; 0: no process has the socket

Flood = Callable[[random.Random, Target, int, ExitStack], tuple[int, list[socket.socket]]]
"""Opens connections to the port, which the stack closes. Returns how many, and those that the
server must end by itself."""


def is_ended(wire: socket.socket) -> bool:
    """Whether the other process has closed a connection over loopback. Linux may still hold bytes
    for a client that does not read; no process owns them then."""
    try:
        (_, ours), (_, theirs) = wire.getsockname(), wire.getpeername()
    except OSError:  # a reset has come
        return True
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        ports = [int(address.rpartition(":")[2], 16) for address in fields[1:3]]
        if ports == [theirs, ours]:
            return fields[INODE] == "0"
    return True


def _opened(port: int, stack: ExitStack) -> socket.socket | None:
    """A connection, or None if the server takes no more."""
    with suppress(OSError):
        wire = connected(port)
        wire.settimeout(5)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return stack.enter_context(wire)
    return None


def _send(wire: socket.socket | None, content: bytes) -> bool:
    """Whether the server took all of it."""
    if wire is None:
        return False
    with suppress(OSError):
        wire.sendall(content)
        return True
    return False


def _sent(port: int, stack: ExitStack, contents: Iterable[bytes]) -> list[socket.socket]:
    """Connections on which the server took the contents."""
    wires = [(_opened(port, stack), content) for content in contents]
    return [wire for wire, content in wires if wire is not None and _send(wire, content)]


def slow_readers(
    rng: random.Random, target: Target, port: int, stack: ExitStack
) -> tuple[int, list[socket.socket]]:
    """Long answers and requests with much to echo, which nobody reads."""
    body = {"input": "a", "max_output_tokens": 1, "metadata": {"a": "x" * HELD}}
    long = post(RESPONSES, body | {"stream": True}, target.key)
    scored = {"prompt": [[5 + i] * 1900 for i in range(3)], "echo": True, "logprobs": 20}
    many = post(COMPLETIONS, scored | {"max_tokens": 1}, target.key)
    wires = _sent(port, stack, [many] * 2 + [long] * rng.randint(4, 8))
    return len(wires), wires


def unfinished_bodies(
    rng: random.Random, target: Target, port: int, stack: ExitStack
) -> tuple[int, list[socket.socket]]:
    """Bodies of which the most is there, and the end does not come."""
    whole = post(COMPLETIONS, {"prompt": "a" * HELD}, target.key)
    wires = _sent(port, stack, [whole[:-100]] * rng.randint(12, 20))
    return len(wires), wires


def slow_bodies(
    rng: random.Random, target: Target, port: int, stack: ExitStack
) -> tuple[int, list[socket.socket]]:
    """Bodies that come in drops."""
    raw = post(COMPLETIONS, {"prompt": "a" * 5000}, target.key)
    head = raw.index(b"\r\n\r\n") + 4
    wires = _sent(port, stack, [raw[: head + 10]] * rng.randint(20, 40))
    for i in range(10):
        time.sleep(0.1)
        for wire in wires:
            _send(wire, raw[head + 10 + i : head + 11 + i])
    return len(wires), wires


def unfinished_heads(
    rng: random.Random, target: Target, port: int, stack: ExitStack
) -> tuple[int, list[socket.socket]]:
    """Connections that say nothing, or a part of a head."""
    parts = (b"", b"POST", b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
    wires = _sent(port, stack, [rng.choice(parts) for _ in range(MANY)])
    return len(wires), wires


def disconnects(
    rng: random.Random, target: Target, port: int, stack: ExitStack
) -> tuple[int, list[socket.socket]]:
    """Clients that leave at any moment, some with a reset."""
    count = 40
    for _ in range(count):
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
        body["stream"] = rng.random() < 0.7
        raw = post(CHAT, body, target.key)
        with ExitStack() as own:
            wire = _opened(port, own)
            cut = rng.choice((len(raw), len(raw), rng.randrange(len(raw))))
            _send(wire, raw[:cut])
            if wire is None:
                continue
            if rng.random() < 0.5:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            elif rng.random() < 0.3:
                with suppress(OSError):
                    wire.shutdown(socket.SHUT_WR)
            time.sleep(rng.choice((0, 0.01, 0.05, 0.1)))
    return count, []


def bursts(
    rng: random.Random, target: Target, port: int, stack: ExitStack
) -> tuple[int, list[socket.socket]]:
    """More requests at once than the queue has places, and requests in one piece."""
    raw = post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}, target.key)
    raw = raw.replace(b"Connection: close", b"Connection: keep-alive")
    body = json.dumps({"prompt": ["a"] * 200, "max_tokens": 2}).encode()
    large = post(COMPLETIONS, body, target.key)
    contents = [rng.choice((raw * 5, large)) for _ in range(rng.randint(60, 120))]
    return len(_sent(port, stack, contents)), []


def tiny_chunks(
    rng: random.Random, target: Target, port: int, stack: ExitStack
) -> tuple[int, list[socket.socket]]:
    """Bodies of chunks of a byte, with a key and without."""
    head = post(COMPLETIONS, b"", rng.choice((target.key, "none")))
    head = head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    body = b"1\r\n \r\n" * rng.choice((5000, 100_000))
    wires = _sent(port, stack, [head] * rng.randint(2, 8))
    for wire in wires:
        _send(wire, body)
    return len(wires), wires


FLOODS: dict[str, Flood] = {
    each.__name__: each
    for each in (
        *(slow_readers, unfinished_bodies, slow_bodies, unfinished_heads, disconnects, bursts),
        tiny_chunks,
    )
}
"""By name."""
