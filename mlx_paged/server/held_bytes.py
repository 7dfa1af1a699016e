"""Bytes that the server holds for clients: bodies, and answers that nobody has read. All of them
have one limit. Imports no mlx."""

from starlette.types import Message, Scope, Send

from mlx_paged.holdings import CountedBy, Holding
from mlx_paged.protocol.request_body import Refusal

FREE = 1 << 16  # bytes of each request that are not counted, so that small requests always pass
PIECE = 1 << 16  # bytes of an answer that are written at once; the next ones wait for the client
PART_BYTES = 64  # of a list, an object or a number in a body, beside its text
ENTRY_BYTES = 400  # of one log-probability with its text
FLAG = "--max-held-bytes"


class HeldBytes:
    """What is held for all requests. Only the thread of the event loop uses it.

    Args:
        most: bytes that all may hold together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0

    def holdings(self) -> list[Holding]:
        """The line of a ledger."""
        return [Holding("bodies_and_answers", self.size, self.most, CountedBy.HEAP)]


class Share:
    """What is held for one request, from its first byte to the end of its answer."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._size = -FREE

    def grow(self, size: int, name: str, status: int = 400) -> None:
        """Hold so many more bytes of what `name` is. Raises Refusal, of the given status if they
        can never fit, of 503 if others leave too few now."""
        before, self._size = max(self._size, 0), self._size + size
        more, held = max(self._size, 0) - before, self._held
        if held.size + more <= held.most:
            held.size += more
            return
        self._size -= size
        if before + more > held.most:
            message = f"{name} takes {before + more} bytes: expected at most {FLAG} {held.most}"
            raise Refusal(status, message)
        message = f"{held.size} bytes are held for others, of {FLAG}: try again later"
        raise Refusal(503, message, "overloaded")

    def close(self) -> None:
        """Hold nothing any more."""
        self._held.size -= max(self._size, 0)
        self._size = -FREE


def share_of(scope: Scope) -> Share:
    """What is held for a request."""
    share: Share = scope["state"]["share"]
    return share


async def send_in_pieces(message: Message, send: Send) -> None:
    """Send a message of ASGI. A long body is sent in pieces: the server holds it until the client
    has read all but the last ones."""
    body = message.get("body", b"")
    if len(body) <= PIECE:
        await send(message)
        return
    for start in range(0, len(body), PIECE):
        is_last = start + PIECE >= len(body)
        more_body = message.get("more_body", False) or not is_last
        piece = body[start : start + PIECE]
        await send({**message, "body": piece, "more_body": more_body})
