"""How large a pool is by default, and what bounds it."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_paged import system_memory
from mlx_paged.arguments import memory
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.memory import (
    LONG_PROMPT,
    default_kv_memory,
    gpu_memory,
    memory_in_use,
    physical_memory,
    spare_memory,
)

USUAL_TOKENS = 1 << 13
"""Tokens of each of the sequences that run together, at most, for which a default pool has room."""

AVAILABLE_SHARE = 5 / 16
"""Part of the memory that the system has available which pool, step and cache take by default. It
is less than half, because inactive pages of macOS are partly those of programs that come back, and
because Python and the tokenizer take memory, too."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a default pool is for, in blocks.

    Attributes:
        usual: of the sequences that run together.
        one: of one request, which may be long. A smaller pool is refused.
        tokens: of that request.
        bound: says what `usual` follows from.
    """

    usual: int
    one: int
    tokens: int
    bound: str

    @classmethod
    def of(
        cls,
        groups: Sequence[LayerGroup],
        block_size: int,
        chunk: int,
        max_running: int,
        positions: int | None,
        kv_tokens: int | None,
    ) -> "Needs":
        """What `max_running` sequences need.

        Args:
            chunk: tokens of a step of one sequence, at most.
            positions: of the model; None: without a limit.
            kv_tokens: all tokens that there will be at once; None: nobody knows.
        """

        def blocks(tokens: int) -> int:
            return sum(group.max_blocks(tokens, chunk, block_size) for group in groups)

        tokens = min(positions or LONG_PROMPT, LONG_PROMPT)
        usual = max_running * blocks(min(positions or USUAL_TOKENS, USUAL_TOKENS))
        if kv_tokens is None:
            bound = f"{max_running} sequences of up to {USUAL_TOKENS:,} tokens"
            return cls(usual, blocks(tokens), tokens, bound)
        width = sum(group.width for group in groups)
        asked, tokens = width * -(-kv_tokens // block_size), min(tokens, kv_tokens)
        return cls(asked, min(asked, blocks(tokens)), tokens, "the tokens that are asked for")


@dataclass(frozen=True, slots=True)
class Beside:
    """What is on the device beside K/V, in bytes: the arrays of a step, also those that plain MLX
    gathers, MLX's cache beyond these arrays, and states that the prefix cache may keep. A CPU
    computes one op after the other and holds few of a step's arrays at once: there the first two
    are 0."""

    step: int
    cache: int
    states: int

    @property
    def steps(self) -> int:
        return self.step + self.cache


def largest_default(beside: int = 0) -> int:
    """Bytes of the largest default pool that the device and the system allow. A step and MLX's
    cache take `beside` bytes."""
    return max(0, min(_bounds(beside).values()))


def default_blocks(block_bytes: int, needs: Needs, beside: Beside) -> tuple[int, str]:
    """How many blocks a pool has by default, and what bounds it.

    The pool is the least of `needs.usual`, of :func:`default_kv_memory`, and of what
    `AVAILABLE_SHARE` leaves; but never less than `needs.one`.

    Args:
        block_bytes: of a block, and of what a companion of the model stores beside it.

    Raises:
        ValueError: there is no room for one request and a step.
    """
    _require_room(needs, needs.one * block_bytes, beside)
    bounds = {name: size - beside.states for name, size in _bounds(beside.steps).items()}
    bounds[needs.bound] = needs.usual * block_bytes
    bound = min(bounds, key=bounds.__getitem__)
    num_blocks = max(0, bounds[bound]) // block_bytes
    if num_blocks >= needs.one:
        return num_blocks, bound
    return needs.one, f"one request of {needs.tokens:,} tokens"


def _bounds(beside: int) -> dict[str, int]:
    """By its name, each bound in bytes of pool."""
    bounds = {"the memory of the device": default_kv_memory(beside)}
    available = system_memory.available_memory()
    if available is not None:
        bounds["the memory that is available"] = int(AVAILABLE_SHARE * available) - beside
    return bounds


def _require_room(needs: Needs, pool: int, beside: Beside) -> None:
    """Raise ValueError if a pool and a step are more than the device or the system has left."""
    available, spare = system_memory.available_memory(), spare_memory()
    if gpu_memory() is None:
        spare = max(0, physical_memory() - memory_in_use())
    left = spare if available is None else min(spare, available)
    step = beside.step + beside.states
    if pool + step <= left:
        return
    told = "" if available is None else f", {memory(available)} are available in the system"
    raise ValueError(
        f"[Engine] kv_memory has no default here: one request of {needs.tokens} tokens takes "
        f"{memory(pool)} of K/V and a step {memory(step)}, but {memory(spare)} are left on the "
        f"device{told}: expected room for both, or a kv_memory (--kv-memory, in GB) for shorter "
        "requests"
    )
