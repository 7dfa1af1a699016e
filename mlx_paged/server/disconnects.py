"""Who hung up: clients that go away while they wait for an answer. Knows no mlx."""

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class DisconnectWatcher:
    """Watches any number of connections from one thread.

    A client is taken to be gone as soon as it closes its sending side, as HTTP clients do only when
    they want no answer any more.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # guards what is registered
        self._here, self._there = socket.socketpair()
        self._selector.register(self._here, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="mlx_paged.watcher", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, connection: socket.socket, gone: Callable[[], object]) -> Iterator[None]:
        """Within this context `gone` is called, in another thread, if the client hangs up."""
        with self._lock:
            self._selector.register(connection, selectors.EVENT_READ, gone)
        try:
            yield
        finally:
            self._forget(connection)

    def close(self) -> None:
        """Watch no more."""
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
        """A connection became readable, which is told once: it ended, or has more to say."""
        try:
            ended = not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if self._forget(connection) and ended:
            gone()

    def _forget(self, connection: socket.socket) -> bool:
        """False if that was done before."""
        with self._lock:
            try:
                self._selector.unregister(connection)
            except (KeyError, ValueError):
                return False
            return True
