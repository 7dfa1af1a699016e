"""What the harness needs of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.serving.trace import Job


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a stream; `is_last`: none will follow."""

    stream: int
    token: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Level:
    """What an engine holds between two steps.

    Attributes:
        running: sequences that have K/V and are being computed.
        waiting: sequences that are not.
        held_bytes: of K/V memory that no other sequence could use now.
        live_tokens: context tokens of the running sequences whose K/V is computed, each
            sequence's counted, shared or not.
        blocks_in_use: of a paged pool.
    """

    running: int
    waiting: int
    held_bytes: int
    live_tokens: int
    blocks_in_use: int | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """What an engine has done since it was made; those it does not know stay 0."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    cow_clones: int = 0
    peak_blocks_in_use: int = 0


class Server(Protocol):
    """An engine as the harness drives it, from one thread."""

    @property
    def pool_bytes(self) -> int | None:
        """K/V memory that is allocated up front; None: it grows."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, job: Job, streams: Sequence[int]) -> None:
        """Queue a job; `streams` names its samples.

        Raises:
            ValueError: the engine could never hold it.
        """

    def step(self) -> list[Token]:
        """Compute what the engine computes at a time; tokens that came out."""

    def level(self) -> Level: ...

    def counters(self) -> Counters: ...

    def causes(self, step: int) -> tuple[str, ...]:
        """What the engine itself says made a step long, likeliest first; asked at the end."""
