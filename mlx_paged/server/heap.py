"""Gives memory that was freed back to the system. Imports no mlx."""

import asyncio
import ctypes
from contextlib import suppress

EVERY_S = 60.0


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
