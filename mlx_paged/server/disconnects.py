"""Notices clients that disconnect while they wait for an answer. Does not import mlx."""

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class DisconnectWatcher:
    """Watches any number of connections from one thread.

    A client counts as gone when it closes its sending side. HTTP clients do that only when they
    want no answer any more.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # guards the selector's registrations
        self._here, self._there = socket.socketpair()
        self._selector.register(self._here, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="mlx_paged.watcher", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, connection: socket.socket, gone: Callable[[], object]) -> Iterator[None]:
        """In this context, the watcher's thread calls `gone` if the client disconnects."""
        with self._lock:
            self._selector.register(connection, selectors.EVENT_READ, gone)
        try:
            yield
        finally:
            self._forget(connection)

    def close(self) -> None:
        """Stop the thread."""
        self._there.close()
        self._thread.join()
        self._here.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._here:
                    return
                assert isinstance(key.fileobj, socket.socket)
                self._look(key.fileobj, key.data)

    def _look(self, connection: socket.socket, gone: Callable[[], object]) -> None:
        """Handle a connection that became readable: it has ended, or it has sent more bytes."""
        try:
            ended = not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if self._forget(connection) and ended:
            gone()

    def _forget(self, connection: socket.socket) -> bool:
        """Stop watching a connection. Returns False if it was not watched."""
        with self._lock:
            try:
                self._selector.unregister(connection)
            except (KeyError, ValueError):
                return False
            return True
