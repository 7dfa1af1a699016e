"""What the operating system says of its memory. Imports no mlx."""

import ctypes
import resource
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

MEMINFO = "/proc/meminfo"
LOWEST_BIT = bytes(byte & 1 for byte in range(256))
HOST_VM_INFO64 = 4  # of mach/host_info.h


class VMStatistics64(ctypes.Structure):
    """``vm_statistics64`` of mach/vm_statistics.h up to the pages that this module counts. The
    kernel fills as much of the structure as the caller has."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("free", "active", "inactive", "wired")),
        ("counters", ctypes.c_uint64 * 9),
        ("purgeable", ctypes.c_uint32),
        ("read_ahead", ctypes.c_uint32),  # of these pages; "free" has them too
    ]


REV0_WORDS = ctypes.sizeof(VMStatistics64) // ctypes.sizeof(ctypes.c_uint32)


MADV_NOHUGEPAGE = 15


def available_memory() -> int | None:
    """Bytes that this machine can give to arrays now without swapping; None: nobody tells.

    On macOS the pages that are free, inactive or purgeable; on Linux ``MemAvailable``. Pages that
    are both inactive and purgeable count twice.
    """
    readers: dict[str, Callable[[], int | None]] = {"darwin": of_mach, "linux": of_meminfo}
    read = readers.get(sys.platform)
    return None if read is None else read()


def of_meminfo(path: str = MEMINFO) -> int | None:
    """Bytes of the line ``MemAvailable`` of Linux's file."""
    try:
        with open(path) as lines:
            for line in lines:
                name, _, size = line.partition(":")
                if name == "MemAvailable":
                    return int(size.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def resident_bytes(address: int, size: int) -> int | None:
    """Bytes of the pages of ``[address, address + size)`` that are in memory; None: the system does
    not tell."""
    page = resource.getpagesize()
    first = address // page * page
    pages = (ctypes.c_ubyte * (-(-(address + size - first) // page)))()
    length = ctypes.c_size_t(address + size - first)
    try:
        failed = _c_library().mincore(ctypes.c_void_p(first), length, pages)
    except AttributeError:
        return None
    return None if failed else page * bytes(pages).translate(LOWEST_BIT).count(1)


def use_small_pages(address: int, size: int) -> None:
    """Ask Linux to use no huge pages in ``[address, address + size)``, so that a write takes no
    more memory than it touches. Linux may refuse; other systems are not asked."""
    if sys.platform != "linux":
        return
    page = resource.getpagesize()
    first = address // page * page
    last = (address + size) // page * page
    _c_library().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_NOHUGEPAGE)


def of_mach(library: Any = None) -> int | None:
    """Bytes of the pages that macOS calls free, inactive or purgeable.

    Args:
        library: has Mach's functions; None: the C library of this process.
    """
    try:
        mach = _c_library() if library is None else library
        host = _host_of(mach)
        pages, size = VMStatistics64(), ctypes.c_size_t()
        words = ctypes.c_uint32(REV0_WORDS)
        failed = mach.host_page_size(host, ctypes.byref(size)) or mach.host_statistics64(
            host, HOST_VM_INFO64, ctypes.byref(pages), ctypes.byref(words)
        )
    except (AttributeError, OSError):
        return None
    if failed:
        return None
    return int(pages.free + pages.inactive + pages.purgeable) * size.value


class MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc's malloc.h."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks")),
        *((name, ctypes.c_size_t) for name in ("fordblks", "keepcost")),
    ]


class Heap(NamedTuple):
    """What glibc took from the system, in bytes.

    Attributes:
        used: it gave out, and they were not freed.
        unused: were freed, or never given out, and it keeps them. After ``malloc_trim`` some of
            their pages are not in memory.
    """

    used: int
    unused: int


def c_heap() -> Heap:
    """The heap of this process; zeros: another C library, which does not tell."""
    try:
        tell = _c_library().mallinfo2
    except AttributeError:
        return Heap(0, 0)
    tell.restype = MallocInfo
    found = tell()
    return Heap(int(found.uordblks + found.hblkhd), int(found.fordblks))


@cache
def _c_library() -> Any:
    return ctypes.CDLL(None)


@cache
def _host_of(mach: Any) -> ctypes.c_uint32:
    """Mach's port of this machine. Each call of ``mach_host_self`` would count one more owner."""
    mach.mach_host_self.restype = ctypes.c_uint32
    return ctypes.c_uint32(mach.mach_host_self())
