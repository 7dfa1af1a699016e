"""Reads the bodies of requests: their size, their pace, and what all of them hold."""

import asyncio
import time

from starlette.requests import ClientDisconnect, Request

from mlx_paged.protocol.request_body import Refusal
from mlx_paged.server.held_bytes import share_of

WHOLE_S = 120.0  # for a whole body
PACE_S = 10.0  # for each PACE_BYTES, and for the rest
PACE_BYTES = 100_000


async def read(request: Request, most: int) -> bytes:
    """The body, of at most `most` bytes, with or without a Content-Length. Raises Refusal if it is
    longer, comes too slowly, or does not fit beside what is held for others."""
    share, size = share_of(request.scope), int(request.headers.get("content-length", 0))
    chunks, length = list[bytes](), 0  # one array that grows would leave holes in the heap
    begun, loop = time.monotonic(), asyncio.get_running_loop()
    due = PACE_BYTES  # bytes that must have come when the time is over
    try:
        async with asyncio.timeout(min(PACE_S, WHOLE_S)) as limit:
            stream = request.stream()
            while size <= most and (chunk := await anext(stream, None)) is not None:
                share.grow(len(chunk), "the body", 413)
                chunks.append(chunk)
                length += len(chunk)
                size = max(size, length)
                if length >= due:
                    due = length + PACE_BYTES
                    rest = begun + WHOLE_S - time.monotonic()
                    limit.reschedule(loop.time() + min(PACE_S, rest))
    except (TimeoutError, ClientDisconnect):
        pace = f"{PACE_BYTES / PACE_S / 1000:g} KB/s or more over {PACE_S:g} s"
        message = f"the body came too slowly: expected {pace}, and all of it in {WHOLE_S:g} s"
        raise Refusal(408, message) from None
    if size > most:
        message = f"the body has {size} bytes: expected at most --max-request-bytes {most}"
        raise Refusal(413, message)
    return b"".join(chunks)
