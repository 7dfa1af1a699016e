"""Errors of the device: MLX tells of one once, to whoever uses the stream next, but the steps of
all runners on the stream may be wrong."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Protocol, TypeVar
from weakref import WeakSet

from mlx_paged import ops
from mlx_paged.scheduler.step import DeviceError

Returned = TypeVar("Returned")


class Marked(Protocol):
    """What a device's error is noted on, until it recovers."""

    error: Exception | None


_marked: WeakSet[Marked] = WeakSet()
_lock = RLock()  # guards _marked


def note_errors_on(runner: Marked) -> None:
    """Note every error of the device on `runner` from now on."""
    with _lock:
        _marked.add(runner)


def noted(error: Exception) -> Exception:
    """An error. If it is a new one of the device, it is noted on everyone."""
    if not ops.is_device_error(error) or isinstance(error, DeviceError):
        return error
    told = DeviceError(str(error))
    with _lock:
        for runner in _marked:
            runner.error = told
    return told


@contextmanager
def telling_errors() -> Iterator[None]:
    """Note an error of the device, whoever meets it, and raise it as one."""
    try:
        yield
    except Exception as error:
        if (told := noted(error)) is error:
            raise
        raise told from error


@telling_errors()
def ended(compute: Callable[[], Returned]) -> Returned:
    """What `compute` evaluates, once the device has ended all that its stream was given. Raises
    DeviceError if something of that failed."""
    found = compute()
    if (end := ops.metal.end_of_work()) is not None:
        end()
    return found
