"""What the system says of its memory and of this process. Imports no mlx."""

import ctypes
import os
import sys
from contextlib import suppress
from enum import IntEnum
from typing import Any, Protocol

PRESSURE = b"kern.memorystatus_vm_pressure_level"
RUSAGE_INFO_V0 = 0  # of Darwin's sys/resource.h
FOOTPRINT = 7  # where `ri_phys_footprint` is among the numbers of `struct rusage_info_v0`


class Level(IntEnum):
    """How short of memory the system is, in the numbers of Darwin's kernel."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


class System(Protocol):
    """Tells how short of memory the system is, and what this process takes of it."""

    def level(self) -> Level:
        """How short of memory the system is."""

    def footprint(self) -> int:
        """Bytes of this process for which the system has to find memory."""

    def trim(self) -> None:
        """Let the C library give back what was freed."""


class _Usage(ctypes.Structure):
    """``struct rusage_info_v0``."""

    _fields_ = [("uuid", ctypes.c_uint8 * 16), ("numbers", ctypes.c_uint64 * 10)]


class MacOS:
    """The figures of macOS, which psutil does not have.

    Args:
        library: the C library.

    Raises:
        OSError: the system does not tell one of the figures.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL(None, use_errno=True) if library is None else library
        self.level()
        self.footprint()

    def level(self) -> Level:
        level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        arguments = PRESSURE, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)
        _require(self._library.sysctlbyname(*arguments), PRESSURE.decode())
        return max(each for each in Level if each <= max(level.value, Level.NORMAL))

    def footprint(self) -> int:
        usage = _Usage()
        arguments = ctypes.c_int(os.getpid()), ctypes.c_int(RUSAGE_INFO_V0), ctypes.byref(usage)
        _require(self._library.proc_pid_rusage(*arguments), "proc_pid_rusage")
        return int(usage.numbers[FOOTPRINT])

    def trim(self) -> None:
        self._library.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))


def _require(result: int, name: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def system() -> System | None:
    """The system's own figures; None where it has none: on Linux nothing is watched."""
    if sys.platform != "darwin":
        return None
    with suppress(OSError, AttributeError, ValueError):
        return MacOS()
    return None
