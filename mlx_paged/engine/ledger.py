"""One ledger of a process's memory: what each purpose holds, and what the process has."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_paged.holdings import CountedBy, Holder, Holding, summed
from mlx_paged.kv.memory import MemoryBudget, gpu_memory
from mlx_paged.kv.pool_holdings import array_bytes
from mlx_paged.metrics.stats import file_bytes, resident_bytes
from mlx_paged.pressure.system import system
from mlx_paged.system_memory import Heap, c_heap


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
    and what the system says that the process has. No line is computed from what the process has
    now. Two are differences: `arrays` is what MLX counts without the lines that it counts,
    `objects` what the C library gave out without MLX's arrays and the lines in its heap.

    Args:
        lines: of all engines of the process, and of whoever else holds memory.
        step: bytes of the arrays of a step at most.
        cache: MLX's limit of freed buffers.
    """
    found = summed(lines)
    heap = c_heap()
    arrays = mx.get_active_memory() - _counted(found, CountedBy.MLX)
    objects = _object_bytes(heap) - _counted(found, CountedBy.HEAP)
    found += [
        Holding("arrays", max(0, arrays), step),
        Holding("freed_buffers", mx.get_cache_memory(), cache),
        Holding("objects", max(0, objects)),
        Holding("unused_heap", heap.unused),
        Holding("mapped_files", file_bytes()),
        Holding("libraries", libraries_bytes()),
    ]
    return {
        "held": {line.name: {"bytes": line.num_bytes, "limit": line.limit} for line in found},
        "sum_bytes": sum(line.num_bytes for line in found),
        "process_bytes": process_bytes(),
    }


@cache
def libraries_bytes() -> int:
    """Bytes of the interpreter and libraries that no other line has, such as small Python objects
    and the stacks of threads: what the process had beside arrays, the C library's heap and files
    when this function was called first, which the first engine does."""
    heap = c_heap()
    others = array_bytes() + _object_bytes(heap) + heap.unused + file_bytes()
    return max(0, process_bytes() - others)


def _object_bytes(heap: Heap) -> int:
    """Bytes of the heap in use that are no arrays of MLX, which are there on a CPU."""
    buffers = mx.get_active_memory() + mx.get_cache_memory() if gpu_memory() is None else 0
    return max(0, heap.used - buffers)


def _counted(lines: Iterable[Holding], by: CountedBy) -> int:
    """Bytes of the lines that this count has, too."""
    return sum(line.num_bytes for line in lines if line.counted_by is by)


def process_bytes() -> int:
    """Bytes of this process: macOS's footprint, elsewhere its pages in memory."""
    found = system()
    return resident_bytes() if found is None else found.footprint()
