"""Where the server listens: a port of an address, or a Unix socket. Imports no mlx."""

import os
import socket
import stat
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address

BACKLOG = 2048  # connections that wait to be accepted


def bound(args: Namespace) -> socket.socket:
    """The socket of --uds, or of --host and --port. Raises ValueError, which names the flags, if
    the server cannot have it."""
    with _naming_flags(args):
        return _of_port(args.host, args.port) if args.uds is None else _of_file(args.uds)


def listen(listener: socket.socket, args: Namespace) -> None:
    """Let clients connect. Raises ValueError as :func:`bound`: another server may listen by now."""
    with _naming_flags(args):
        listener.listen(BACKLOG)


@contextmanager
def _naming_flags(args: Namespace) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = str(error.strerror or error).partition(" (while")[0]
        given = f"--host {args.host} --port {args.port}"
        expected = "an address of this machine and a free port; --port 0 takes one"
        if args.uds is not None:
            given = f"--uds {args.uds}"
            expected = "a path in a directory that can be written, where no server listens"
        raise ValueError(f"{given}: {why}: expected {expected}") from error


def address_of(listener: socket.socket) -> tuple[str, int] | str:
    """Host and port, or the path of a Unix socket."""
    name = listener.getsockname()
    return name if isinstance(name, str) else name[:2]


def url_of(listener: socket.socket, scheme: str) -> str:
    """The URL where clients reach a socket; of a Unix socket the path."""
    address = address_of(listener)
    if isinstance(address, str):
        return f"{scheme}+unix:{address}"
    host, port = address
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_open_to_others(listener: socket.socket) -> bool:
    """Whether other machines may reach a socket."""
    address = address_of(listener)
    return not isinstance(address, str) and not ip_address(address[0]).is_loopback


def close(listener: socket.socket, address: tuple[str, int] | str) -> None:
    """Close the socket of an address, which may be closed; the file of a Unix socket goes, too."""
    listener.close()
    if isinstance(address, str):
        with suppress(OSError):
            os.unlink(address)


def _of_port(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _of_file(path: str) -> socket.socket:
    """A socket that listens already, so that a second server sees that the path is taken. A file
    that a killed server has left is replaced."""
    if not path:
        raise OSError("the path is empty")
    listener = socket.socket(socket.AF_UNIX)
    try:
        if _is_left(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _is_left(path: str) -> bool:
    """Whether there is a Unix socket where nobody listens."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:  # it does not exist, or its queue is full
        return False
    return False
