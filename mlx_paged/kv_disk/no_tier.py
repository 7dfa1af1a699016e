"""What a scheduler asks of a tier beyond the pool, with the answers of none. Knows no mlx."""

from typing import Any

from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv.prefix_match import MissReason, PrefixMatch
from mlx_paged.request import Request


class NoTier:
    """K/V is in the pool and nowhere else.

    Attributes:
        exists: whether there is a tier: else a step need not ask.
        loading: requests by id that wait for their K/V.
    """

    exists = False

    def __init__(self) -> None:
        self.loading: dict[int, Request] = {}

    def ask(self, request: Request) -> bool:
        """Start to read what the pool lacks of a prompt; whether the request has to wait for it."""
        return False

    def arrived(self, waits: bool) -> list[Request]:
        """The requests that need not wait any more. A step is planned from here on. If it `waits`,
        there is nothing else to compute; this takes a short time then."""
        return []

    def adopt(self, request: Request) -> list[BlockTransfer]:
        """Add what was read for a request to the prefix cache; the step writes it before all else.
        While there are too few blocks, nothing is added, and what was read is kept."""
        return []

    def admitted(self, request: Request, match: PrefixMatch) -> MissReason | None:
        """A request shares what was found; returns why it found no more."""
        return match.miss

    def forget(self, request: Request) -> None:
        """The request was admitted, or has ended."""

    def leaving(self) -> list[BlockTransfer]:
        """What the step that was planned has to copy before it writes anything."""
        return []

    def copies_when_idle(self) -> list[BlockTransfer]:
        """Blocks to copy now, while no step is under way."""
        return []

    def has_more(self) -> bool:
        """Whether an idle engine should copy more."""
        return False

    def put(self, copied: list[tuple[bytes, list[Any]]]) -> None:
        """Keep what was copied: keys, and buffers that never change."""

    def metrics(self) -> dict[str, Any] | None:
        """Counters as plain JSON values: see docs/metrics.md."""
        return None

    def close(self) -> None:
        """Give up the disk. What was given to :meth:`put` is written before."""
