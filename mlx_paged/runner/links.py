"""Sockets between rank 0 and each other rank: plans one way, signs of life both ways."""

import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import numpy as np

TICK_S = 0.5  # between two signs of life
SILENT_TICKS = 7
"""A rank is lost after so many ticks without a sign. Ticks of a process that is itself stopped, or
that gets no processor, do not pass."""
LEAVE_S = 2.0  # for a rank to end when rank 0 has left, unless it hangs
CONNECT_S = 60.0
HEADER = struct.Struct("<BI")
SECRET_BYTES = 32


class Kind(IntEnum):
    """What a frame carries."""

    BEAT = 0  # nothing: this frame is one byte
    PLAN = 1  # a step
    ASK = 2  # JSON: how to make an engine
    REPLY = 3  # JSON: the answer
    FAILURE = 4  # text: why the rank that sends it ends
    FAREWELL = 5  # rank 0 has ended as it should


class LostRank(ConnectionError):
    """Another rank has ended or hangs, so that no step can be computed any more."""


class Link:
    """One end of a connection between two ranks. A thread of its own notices when the other rank
    ends or stops, while the thread that computes may hang in a collective operation.

    Args:
        rank: the other one.
        lost: called in that thread with the reason.
    """

    def __init__(self, sock: socket.socket, rank: int, lost: Callable[[int, str], None]) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self._socket, self._lost = sock, lost
        self._inbox: SimpleQueue[tuple[Kind, bytes]] = SimpleQueue()
        self._sending = threading.Lock()
        self._buffer = bytearray()
        threading.Thread(target=self._watch, name=f"rank {rank}", daemon=True).start()

    def send(self, kind: Kind, content: bytes = b"") -> None:
        """Raises LostRank if the other rank has gone."""
        try:
            with self._sending:
                self._socket.sendall(HEADER.pack(kind, len(content)) + content)
        except OSError as error:
            raise LostRank(f"rank {self.rank} has ended") from error

    def receive(self) -> tuple[Kind, bytes]:
        """Wait for the next plan, question or answer, or for the farewell."""
        return self._inbox.get()

    def _watch(self) -> None:
        poller, silent, beat_at = select.poll(), 0, 0.0
        poller.register(self._socket, select.POLLIN)
        reason = f"has sent nothing for {TICK_S * SILENT_TICKS} seconds"
        try:
            while silent < SILENT_TICKS:
                is_ready = poller.poll(1000 * TICK_S)
                silent = 0 if is_ready else silent + 1
                if time.monotonic() - beat_at >= TICK_S:
                    beat_at = time.monotonic()
                    self._beat()
                if is_ready and not self._read():
                    return
        except OSError:
            reason = "has ended"
        except LostRank as error:
            reason = str(error)
        self._lost(self.rank, reason)

    def _beat(self) -> None:
        if self._sending.acquire(blocking=False):  # else what is being sent is a sign of life
            try:
                self._socket.send(bytes([Kind.BEAT]), socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            finally:
                self._sending.release()

    def _read(self) -> bool:
        """Take what has come; False if it is a farewell."""
        content = self._socket.recv(1 << 18)
        if not content:
            raise ConnectionResetError
        self._buffer += content
        while self._buffer:
            if self._buffer[0] == Kind.BEAT:
                del self._buffer[0]
                continue
            if len(self._buffer) < HEADER.size:
                break
            kind, size = HEADER.unpack_from(self._buffer)
            if len(self._buffer) < HEADER.size + size:
                break
            content = bytes(self._buffer[HEADER.size : HEADER.size + size])
            del self._buffer[: HEADER.size + size]
            if kind == Kind.FAILURE:
                raise LostRank(content.decode())
            self._inbox.put((Kind(kind), content))
            if kind == Kind.FAREWELL:
                time.sleep(LEAVE_S)
                os._exit(0)  # the other thread hangs in a collective operation
        return True


def connect(group: mx.distributed.Group, lost: Callable[[int, str], None]) -> list[Link]:
    """Links of rank 0 to all others, or of another rank to rank 0. The address and a secret, which
    keeps others out, travel through `group`.

    Raises:
        ValueError: the backend of `group` names no address.
        OSError: no connection.
    """
    host = _first_host()
    note = np.zeros(1 + SECRET_BYTES, np.int32)
    listener = None
    if group.rank() == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=group.size())
        note[0] = listener.getsockname()[1]
        note[1:] = list(secrets.token_bytes(SECRET_BYTES))
    shared: Any = mx.distributed.all_sum(mx.array(note), group=group).tolist()
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
            sock.settimeout(TICK_S)
            found = sock.recv(SECRET_BYTES + 1, socket.MSG_WAITALL)
            if hmac.compare_digest(found[:-1], secret):
                links[found[-1]] = Link(sock, found[-1], lost)
            else:
                sock.close()
    return [links[rank] for rank in sorted(links)]


def _first_host() -> str:
    """Rank 0's address as mlx.launch tells it to every rank."""
    path, coordinator = map(os.environ.get, ("MLX_HOSTFILE", "MLX_JACCL_COORDINATOR"))
    if coordinator is None and path is not None:
        first = json.loads(Path(path).read_text())[0]
        coordinator = first if isinstance(first, str) else first[0]
    if coordinator is None:
        raise ValueError("mlx.launch names no address of rank 0: expected --backend ring or jaccl")
    return coordinator.rpartition(":")[0].strip("[]")
