"""Sockets between rank 0 and each other rank: plans one way, signs of life both ways."""

import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx

TICK_S = 0.5  # between two signs of life
SILENT_TICKS = 7
"""A rank is lost after so many ticks without a sign. While this process is itself stopped, or gets
no processor, ticks do not pass."""
LEAVE_S = 2.0  # for a rank to end after rank 0 has, unless it hangs
CONNECT_S = 60.0
GREETING_S = 5.0  # for a client to say who it is
HEADER = struct.Struct("<BI")


class Kind(IntEnum):
    """What a frame carries."""

    BEAT = 1  # nothing: a sign of life
    PLAN = 2  # a step to launch
    COLLECT = 3  # a question: has the oldest step under way ended?
    MEASURE = 4  # a question: for how many blocks does the rank have memory?
    MAKE = 5  # a question: how many bytes does a pool of this size take, and are decodes compiled?
    ANSWER = 6  # the answer to a question
    FAILURE = 7  # the text of an error that ends the rank
    FAREWELL = 8  # nothing: rank 0 has ended as it should
    SETTLE = 9  # nothing: begin all of the steps under way, and wait for them
    FACTORS = 10  # what rows add, for a slot
    RECOVER = 11  # nothing: the next step was not planned; forget the states of all sequences


class LostRank(ConnectionError):
    """Another rank has ended or hangs, so that no step can be computed any more."""


class Link:
    """One end of a connection to another rank. A thread of its own notices when that rank ends or
    stops, while the thread that computes may hang in a collective operation. It calls `lost` with
    the other's rank and the reason."""

    def __init__(self, sock: socket.socket, rank: int, lost: Callable[[int, str], None]) -> None:
        seconds = struct.pack("ll", 0, int(1e6 * TICK_S))
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._rank, self._lost = sock, rank, lost
        self._inbox: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self._sending = threading.Lock()
        threading.Thread(target=self._watch, name=f"rank {rank}", daemon=True).start()

    def send(self, kind: int, content: bytes = b"") -> None:
        """Raises LostRank if the other rank has gone."""
        try:
            with self._sending:
                self._socket.sendall(HEADER.pack(kind, len(content)) + content)
        except OSError as error:
            raise LostRank(f"rank {self._rank} has ended") from error

    def receive(self) -> tuple[int, bytes]:
        """Wait for the next frame that is neither a beat nor an error."""
        return self._inbox.get()

    def _watch(self) -> None:
        silent, beat_at, buffer = 0, 0.0, bytearray()
        reason = f"has sent nothing for {TICK_S * SILENT_TICKS} seconds"
        try:
            while silent < SILENT_TICKS:
                silent += 1
                try:
                    content = self._socket.recv(1 << 18)
                    if not content:
                        raise ConnectionResetError
                    silent = 0
                    buffer += content
                    self._take(buffer)
                except BlockingIOError:
                    pass
                is_due = time.monotonic() - beat_at >= TICK_S
                if is_due and self._sending.acquire(blocking=False):
                    try:  # what another thread is sending is a sign of life, too
                        beat_at = time.monotonic()
                        self._socket.sendall(HEADER.pack(Kind.BEAT, 0))
                    finally:
                        self._sending.release()
        except LostRank as error:
            reason = "has ended" if error.__cause__ else str(error)
        except OSError:
            reason = "has ended"
        self._lost(self._rank, reason)

    def _take(self, buffer: bytearray) -> None:
        """Move the frames of `buffer` into the inbox."""
        while len(buffer) >= HEADER.size:
            kind, size = HEADER.unpack_from(buffer)
            if len(buffer) < HEADER.size + size:
                break
            content = bytes(memoryview(buffer)[HEADER.size : HEADER.size + size])
            del buffer[: HEADER.size + size]
            if kind == Kind.FAILURE:
                raise LostRank(content.decode())
            if kind != Kind.BEAT:
                self._inbox.put((kind, content))
            if kind == Kind.FAREWELL:
                time.sleep(LEAVE_S)
                os._exit(0)  # the other thread hangs in a collective operation


def connect(group: mx.distributed.Group, lost: Callable[[int, str], None]) -> list[Link]:
    """Links of rank 0 to all others, or of another rank to rank 0. The port and a secret, which
    keeps others out, travel through `group`. Raises OSError or ValueError if there is no way."""
    host, listener, note = _first_host(), None, [0] * 33
    if group.rank() == 0:
        listener = socket.create_server((host, 0), backlog=group.size())
        note = [listener.getsockname()[1], *secrets.token_bytes(32)]
    shared: Any = mx.distributed.all_sum(mx.array(note, mx.int32), group=group).tolist()
    port, secret = shared[0], bytes(shared[1:])
    if listener is None:
        sock = socket.create_connection((host, port), CONNECT_S)
        sock.sendall(secret + bytes([group.rank()]))
        return [Link(sock, 0, lost)]
    links: dict[int, Link] = {}
    listener.settimeout(CONNECT_S)
    with listener:
        while len(links) < group.size() - 1:
            sock, _ = listener.accept()
            found = _greeting(sock)
            if hmac.compare_digest(found[:-1], secret) and 0 < found[-1] < group.size():
                links[found[-1]] = Link(sock, found[-1], lost)
            else:
                sock.close()
    return [links[rank] for rank in sorted(links)]


def _greeting(sock: socket.socket) -> bytes:
    """The first 33 bytes that a client sends, or fewer if it is slow."""
    found = b""
    sock.settimeout(GREETING_S)
    with suppress(OSError):
        while len(found) < 33 and (more := sock.recv(33 - len(found))):
            found += more
    return found


def _first_host() -> str:
    """Rank 0's address as mlx.launch tells it to every rank."""
    path, address = map(os.environ.get, ("MLX_HOSTFILE", "MLX_JACCL_COORDINATOR"))
    if path is not None:
        address = json.loads(Path(path).read_text())[0][0]
    if address is None:
        raise ValueError("mlx.launch names no address of rank 0: expected --backend ring or jaccl")
    return address.rpartition(":")[0]
