"""Gives memory that was freed back to the system. Imports no mlx."""

import asyncio
import ctypes
from contextlib import suppress

EVERY_S = 60.0
ARENAS = 2
M_ARENA_MAX = -8  # of glibc's malloc.h


def limit_arenas() -> None:
    """Let all threads allocate from ARENAS arenas of the C library. glibc makes more for more
    threads, and each keeps holes where models were that the server has unloaded. Call this before
    the process has a second thread. C libraries without arenas need no call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def trim() -> None:
    """Let the C library give back what it keeps. glibc keeps all that is freed below memory in use,
    so that long bodies and grammars would leave holes. Other C libraries need no call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


async def keep_trimmed() -> None:
    """Call :func:`trim` every EVERY_S, in a thread, since it takes some ms. Runs until
    cancelled."""
    while True:
        await asyncio.sleep(EVERY_S)
        await asyncio.to_thread(trim)
