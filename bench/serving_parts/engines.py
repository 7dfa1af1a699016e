"""The engines by name, and how each is made for a workload."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.nn as nn

from bench.serving_parts.batch_server import BatchServer
from bench.serving_parts.paged_server import PagedServer
from bench.serving_parts.sequential_server import SequentialServer
from bench.serving_parts.server import Server
from bench.serving_parts.static_batches import StaticBatches
from bench.serving_parts.trace import Trace
from mlx_paged.allocation import ceil_div
from mlx_paged.kv_pool import block_bytes
from mlx_paged.model_probe import probe

STATIC = "_static"
"""Ending of the name of an engine that runs batch after batch."""

ENGINES = ("mlx_paged", "mlx_lm", "mlx_lm_static", "sequential", "mlx_paged_static")
DEFAULT = ENGINES[:4]


@dataclass(frozen=True)
class Limits:
    """What all engines are given.

    Attributes:
        max_running: sequences side by side at most.
        prefill_chunk: prompt tokens of a sequence computed at a time, of all for mlx_paged.
        block_size, num_blocks, max_stall_ms, policy, prefix_cache: mlx_paged's own.
    """

    max_running: int
    prefill_chunk: int
    block_size: int
    num_blocks: int
    max_stall_ms: float | None = None
    policy: str = "fcfs"
    prefix_cache: bool = True


def make_server(name: str, model: nn.Module, limits: Limits) -> Server:
    """`name` is one of :data:`ENGINES`."""
    if name.endswith(STATIC):
        inner = make_server(name.removesuffix(STATIC), model, limits)
        return StaticBatches(inner, limits.max_running)
    makers: dict[str, Callable[[], Server]] = {
        "mlx_paged": lambda: PagedServer(
            model,
            max_running=limits.max_running,
            prefill_chunk=limits.prefill_chunk,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_stall_ms=limits.max_stall_ms,
            policy=limits.policy,
            prefix_cache=limits.prefix_cache,
        ),
        "mlx_lm": lambda: BatchServer(model, limits.max_running, limits.prefill_chunk),
        "sequential": lambda: SequentialServer(model, limits.prefill_chunk),
    }
    return makers[name]()


def static_sibling(name: str) -> str | None:
    """The same engine without top-up; None for one that has none, or is one."""
    sibling = name + STATIC
    return sibling if sibling in ENGINES else None


def enough_blocks(trace: Trace, max_running: int, block_size: int) -> int:
    """A pool in which the `max_running` largest sequences fit side by side, with a little room."""
    blocks = sorted((b for b, n in _blocks(trace, block_size) for _ in range(n)), reverse=True)
    needed = sum(blocks[:max_running])
    return needed + needed // 50 + 2 * max_running


def static_blocks(trace: Trace, max_running: int, block_size: int) -> int:
    """Blocks that a reservation of the longest sequence takes for every one side by side."""
    blocks = _blocks(trace, block_size)
    places = min(max_running, sum(count for _, count in blocks))
    return places * max(needed for needed, _ in blocks)


def kv_token_bytes(model: nn.Module) -> int:
    """K/V bytes of one token of one sequence in all layers."""
    return block_bytes(probe(model).shapes, block_size=1)


def _blocks(trace: Trace, block_size: int) -> list[tuple[int, int]]:
    """For each job, blocks of one sample and the number of samples."""
    return [(ceil_div(job.kv_tokens, block_size), job.samples) for job in trace]
