"""One ledger of a process's memory: what each purpose holds, and what the process has."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_paged.holdings import Holder, Holding, summed
from mlx_paged.kv.memory import MemoryBudget
from mlx_paged.kv.pool_holdings import array_bytes
from mlx_paged.metrics.stats import resident_bytes
from mlx_paged.pressure.system import system
from mlx_paged.system_memory import unused_heap


class Ledger:
    """What an engine holds.

    Attributes:
        holders: whoever holds memory for the engine adds a function that tells its lines.
        budget: what the engine's memory is for.
    """

    def __init__(self, holders: Iterable[Holder], budget: MemoryBudget) -> None:
        self.holders = list(holders)
        self.budget = budget
        libraries_bytes()

    def lines(self) -> list[Holding]:
        """The engine's own lines. Call this on the thread that uses the engine."""
        return summed(line for holder in self.holders for line in holder())

    def report(self) -> dict[str, Any]:
        """The account of a process with this engine; see :func:`account`."""
        return account(self.lines(), self.budget.step, self.budget.cache)


def account(
    lines: Iterable[Holding], step: int | None = None, cache: int | None = None
) -> dict[str, Any]:
    """A process's memory as plain JSON values: by name what is held and its limit, the sum of all,
    and what the system says that the process has. All figures but one are measured. `arrays` is
    computed: the bytes of MLX's arrays minus those of the lines; steps and other engines have them.

    Args:
        lines: of all engines of the process, and of whoever else holds memory.
        step: bytes of the arrays of a step at most.
        cache: MLX's limit of freed buffers.
    """
    found = summed(lines)
    others = mx.get_active_memory() - sum(line.num_bytes for line in found if line.is_mlx)
    found += [
        Holding("arrays", max(0, others), step),
        Holding("freed_buffers", mx.get_cache_memory(), cache),
        Holding("unused_heap", unused_heap()),
        Holding("libraries", libraries_bytes()),
    ]
    return {
        "held": {line.name: {"bytes": line.num_bytes, "limit": line.limit} for line in found},
        "sum_bytes": sum(line.num_bytes for line in found),
        "process_bytes": process_bytes(),
    }


@cache
def libraries_bytes() -> int:
    """Bytes of the interpreter, libraries and tokenizers: what the process had beside arrays when
    this function was called first, which the first engine does."""
    return max(0, process_bytes() - array_bytes() - unused_heap())


def process_bytes() -> int:
    """Bytes of this process: macOS's footprint, elsewhere its pages in memory."""
    found = system()
    return resident_bytes() if found is None else found.footprint()
