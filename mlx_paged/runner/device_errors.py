"""Errors of the device: MLX tells of one once, to whoever uses the stream next, but the steps of
all runners on the stream may be wrong."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any, NoReturn, Protocol, TypeVar
from weakref import WeakSet

from mlx_paged import ops
from mlx_paged.scheduler.step import DeviceError, UnknownEndError

Returned = TypeVar("Returned")


class Marked(Protocol):
    """What a device's error is noted on, until it recovers."""

    error: Exception | None


_marked: WeakSet[Marked] = WeakSet()
_lock = RLock()  # guards _marked
_latest: DeviceError | None = None  # that anyone was told of; never raised: it would hold frames


def note_errors_on(runner: Marked) -> None:
    """Note every error of the device on `runner` from now on."""
    with _lock:
        _marked.add(runner)


def noted(error: Exception) -> Exception:
    """What to raise for `error`. A new error of the device is noted on all runners."""
    global _latest
    if not ops.is_device_error(error) or isinstance(error, DeviceError):
        return error
    if ops.is_of_another_thread(error):
        return UnknownEndError(str(error))
    _latest = DeviceError(str(error))
    with _lock:
        for runner in _marked:
            runner.error = DeviceError(str(error))  # one each: a raised one holds what raised it
    return DeviceError(str(error))


def raise_noted(error: Exception) -> NoReturn:
    """Raise `error`; raise an error of the device as what :func:`noted` makes of the error."""
    if (told := noted(error)) is error:
        raise error
    raise told from error


@contextmanager
def telling_errors() -> Iterator[None]:
    """Note an error of the device, whoever meets it, and raise it as one. An error that somebody
    else was told of within this context is raised, too: the work that this context waits for may
    have failed. Python's collector can close an engine at any moment, and close() waits."""
    before = _latest
    try:
        yield
    except Exception as error:
        raise_noted(error)
    if _latest is not before:
        raise DeviceError(str(_latest))


def waiting(runner: Marked, end: Callable[[], None]) -> Callable[[], None]:
    """What waits for the end of work of `runner`'s, and raises if the work may be wrong."""

    @telling_errors()
    def wait() -> None:
        if runner.error is not None:
            raise runner.error
        end()

    return wait


@telling_errors()
def ended(compute: Callable[[], Returned]) -> Returned:
    """What `compute` evaluates, once the device has ended all that its stream was given. Raises
    DeviceError if something of that failed."""
    found = compute()
    if (end := ops.metal.end_of_work()) is not None:
        end()
    return found


def telling(read: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """What reads a copy. Who calls it may go on after an error, and MLX tells of an error once."""
    told: Callable[[], Any] = telling_errors()(partial(read, *args))
    return told
