"""What the scheduler asks of a tier, which keeps K/V beyond the pool. Knows no mlx."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlx_paged.holdings import Holding
from mlx_paged.kv.blocks import BlockTransfer
from mlx_paged.kv.prefix_match import PrefixMatch
from mlx_paged.request import Request


class Prefetch(Protocol):
    """Brings K/V from beyond the pool for prompts that wait."""

    @property
    def loading(self) -> Mapping[int, Request]:
        """Requests by id that wait for their K/V, outside the queue."""

    def ask(self, request: Request) -> bool:
        """Start to read what the pool lacks of a prompt; whether the request has to wait for it."""

    def delays(self, request: Request, loads: list[BlockTransfer]) -> bool:
        """Add what was read for a request to `loads`, which the step writes before all else.
        Returns whether the request has to wait for more."""

    def admitted(self, request: Request, match: PrefixMatch) -> str | None:
        """A request shares what was found; returns why it found no more."""

    def forget(self, request: Request) -> None:
        """The request has ended."""


class Tier(Prefetch, Protocol):
    """Copies blocks out of the pool, and finds them there for new prompts."""

    @property
    def leaving(self) -> Mapping[bytes, BlockTransfer]:
        """What the step being planned has to copy before it writes anything, by its key."""

    def arrived(self, waits: bool) -> list[Request]:
        """The requests that need not wait any more. From here on a step is planned. With `waits`
        there is nothing else to compute, so the tier may wait a short time."""

    def copies_when_idle(self) -> list[BlockTransfer]:
        """Blocks to copy now, while no step is under way."""

    def has_more(self) -> bool:
        """Whether an idle engine should copy more."""

    def put(self, copied: Sequence[BlockTransfer]) -> None:
        """Keep what a step has copied."""

    def metrics(self) -> dict[str, Any] | None:
        """Counters as plain JSON values; None if there is no tier."""

    def holdings(self) -> list[Holding]:
        """What memory the tier takes."""

    def close(self) -> None:
        """Write what was given to :meth:`put`, then keep nothing more."""


class NoTier:
    """A tier that keeps nothing."""

    loading: Mapping[int, Request] = {}
    leaving: Mapping[bytes, BlockTransfer] = {}

    def arrived(self, waits: bool) -> list[Request]:
        return []

    def ask(self, request: Request) -> bool:
        return False

    def delays(self, request: Request, loads: list[BlockTransfer]) -> bool:
        return False

    def admitted(self, request: Request, match: PrefixMatch) -> str | None:
        return match.miss

    def forget(self, request: Request) -> None:
        pass

    def copies_when_idle(self) -> list[BlockTransfer]:
        return []

    def has_more(self) -> bool:
        return False

    def put(self, copied: Sequence[BlockTransfer]) -> None:
        pass

    def holdings(self) -> list[Holding]:
        return []

    def metrics(self) -> None:
        return None

    def close(self) -> None:
        pass
