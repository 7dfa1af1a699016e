"""What the memory of a device is for: how large a pool can be and is by default, and the rest."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.arguments import MAX_INT32, memory
from mlx_paged.kv.layer_groups import PoolPlan
from mlx_paged.kv.pool import planned_block_bytes
from mlx_paged.kv.shapes import KVShape

HOST_LIMIT = 1 << 29  # bytes of the largest default pool on a CPU
GPU_SHARE = 0.85
"""Pools are sized so that all arrays together fill this part of the working set that Metal
recommends."""
ROOM = 4 * 10**9
"""Bytes of the working set that a default pool leaves to a step, MLX's cache and other programs,
unless that would take more than half of what can be spared."""
RECLAIM_SHARE = 0.95
"""Part of the working set from which on MLX releases what it caches. All that an engine takes by
default is less, unless its pool would then be less than half of what can be spared."""
CACHE_SHARE = 0.1  # default limit of MLX's cache, as a part of the device's memory
LONG_PROMPT = 1 << 14  # tokens; a step takes more where keys of a longer prompt are gathered
NUM_EMPTY_BLOCKS = 1 << 16


class Promise(Protocol):
    """What may take memory later that is not to be given to others."""

    @property
    def promised_bytes(self) -> int:
        """Bytes that it may take and has not taken yet."""


_promises: WeakSet[Promise] = WeakSet()
_lock = threading.Lock()  # guards _promises


def promise(holder: Promise) -> None:
    """While `holder` lives, count what it may take as in use."""
    with _lock:
        _promises.add(holder)


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def working_set() -> int | None:
    """Bytes of the largest working set that Metal recommends; None on a CPU."""
    size = mx.device_info().get("max_recommended_working_set_size")
    return None if size is None else int(size)


def gpu_memory() -> int | None:
    """Bytes that a GPU can hold: a Mac's the working set, another one its memory; None on a CPU."""
    of_gpu = mx.device_info().get("total_memory")  # MLX's CUDA backend says this
    return working_set() or int(of_gpu or 0) or None


def device_memory() -> int:
    """Bytes that the default device can hold, on a CPU all memory."""
    return gpu_memory() or physical_memory()


def memory_in_use() -> int:
    """Bytes of all evaluated arrays of this process, of pools that MLX does not count, and those
    that are promised and not taken yet."""
    with _lock:
        promised = sum(holder.promised_bytes for holder in _promises)
    return mx.get_active_memory() + ops.reserved_bytes() + promised


def spare_memory() -> int:
    """Bytes that K/V may take beside what is in use: on a GPU up to `GPU_SHARE` of the working set,
    on a CPU up to half of the memory."""
    recommended = working_set()
    limit = physical_memory() // 2 if recommended is None else int(GPU_SHARE * recommended)
    return max(0, limit - memory_in_use())


def default_kv_memory(beside: int = 0) -> int:
    """Bytes of a pool that is allocated at once.

    On a CPU ``min(memory / 4, HOST_LIMIT)``. On a GPU ``max(spare / 2, min(spare, room))``, where
    `spare` is :func:`spare_memory` and ``room = min(recommended - ROOM, RECLAIM_SHARE * recommended
    - beside) - memory in use``.

    Args:
        beside: bytes of a step, of what it gathers, and of MLX's cache.
    """
    recommended = working_set()
    if recommended is None:
        return min(physical_memory() // 4, HOST_LIMIT)
    spare = spare_memory()
    room = min(recommended - ROOM, int(RECLAIM_SHARE * recommended) - beside) - memory_in_use()
    return max(spare // 2, min(spare, room))


def default_cache_limit(pool: int | None, step: int, beside: int = 0) -> int | None:
    """Bytes of freed buffers that MLX may keep; None on a CPU, where nothing is limited.

    At least the arrays of a `step`: what is kept are those, and with less each step would make new
    ones. With ``part = CACHE_SHARE * memory`` of the device it is ``max(step, part / 2, min(part,
    RECLAIM_SHARE * memory - beside))``. For a `pool` of a given size it is at most ``max(step, pool
    / 2)``.

    Args:
        pool: bytes of a pool whose size was given; None: the pool has the default size.
        step: bytes of a step.
        beside: bytes of everything else on the device.
    """
    size = gpu_memory()
    if size is None:
        return None
    limit = int(CACHE_SHARE * size)
    limit = max(limit // 2, min(limit, int(RECLAIM_SHARE * size) - beside))
    return max(min(step, size), limit if pool is None else min(limit, pool // 2))


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What an engine's memory is for, in bytes.

    Attributes:
        weights: of the models, and of the adapters of requests at most.
        pool: K/V, and states that the prefix cache may keep.
        cache: MLX's limit for freed buffers; None on a CPU, where nothing limits them. Buffers as
            large as a step are those of the step, which count once.
        step: the arrays of a step at most.
        gathered: what a step takes beside these where plain MLX computes on a GPU: keys and values
            that it gathers, dequantized if the pool is quantized, masks and scores.
        tokens: for which the pool has room; 0: nobody says.
        bound: what bounds the pool.
    """

    weights: int
    pool: int
    cache: int | None
    step: int
    gathered: int = 0
    tokens: int = 0
    bound: str = ""

    @property
    def parts(self) -> dict[str, int]:
        of_step, cache = self.step + self.gathered, {}
        if self.cache is not None:
            cache = {"cache": max(0, self.cache - of_step)}
        gathered = {"gathered": self.gathered} if self.gathered else {}
        return {"weights": self.weights, "pool": self.pool, **cache, "step": self.step, **gathered}

    def beside(self, other: "MemoryBudget") -> "MemoryBudget":
        """The budget of this model and of another model, which compute one after the other."""
        pool, step = self.pool + other.pool, max(self.step, other.step)
        gathered, caches = max(self.gathered, other.gathered), (self.cache, other.cache)
        cache = max((each for each in caches if each is not None), default=None)
        weights = self.weights + other.weights
        return MemoryBudget(weights, pool, cache, step, gathered, self.tokens, self.bound)

    @property
    def line(self) -> str:
        """What a command says at its start, and how to change it."""
        can_change = "--kv-memory changes"
        if self.cache is not None:
            can_change = "--kv-memory and --cache-limit change"
        limit = "memory" if working_set() is None else "working set"
        is_too_much = sum(self.parts.values()) > device_memory()
        too_much = f"; this exceeds the {limit}: expect swapping" * is_too_much
        room = f"; the pool holds {self.tokens:,} tokens, bounded by {self.bound}"
        return f"memory: {self}{room * bool(self.tokens)}; {can_change} it{too_much}"

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {size / 1e9:.2f}" for name, size in self.parts.items())
        total = sum(self.parts.values()) / 1e9
        return f"at most {total:.2f} of {device_memory() / 1e9:.2f} GB ({parts})"


def longest_pool(shapes: Sequence[KVShape], block_size: int) -> int:
    """How many blocks a pool can have: Metal limits the bytes of each array."""
    max_length = mx.device_info().get("max_buffer_length")
    longest = block_size * max((shape.array_bytes for shape in shapes), default=0)
    return 1 << 62 if max_length is None or longest == 0 else int(max_length) // longest


def num_blocks_for(
    plan: PoolPlan,
    block_size: int,  # tokens that all layers hold together in ``plan.width`` blocks
    # The budget; None: the default less `reserved`, limited by `longest_pool`.
    kv_memory: int | None,
    reserved: int = 0,  # bytes that states of the prefix cache may take
    beside: int = 0,  # see `default_kv_memory`
) -> int:
    """How many blocks the budget in bytes holds. The caller evaluates the weights before. Raises
    ValueError if it holds no block, or if the device cannot hold the budget."""
    one_block = planned_block_bytes(plan.arrays)
    smallest = one_block * plan.width
    if kv_memory is not None:
        longest = (longest_pool([array.shape], array.block_size) for array in plan.arrays)
        _check_held(kv_memory, min(longest, default=0) * one_block, reserved)
    default = max(0, default_kv_memory(beside) - reserved)
    budget = default if kv_memory is None else kv_memory
    if one_block == 0:  # no layer stores K/V: blocks just count tokens
        return NUM_EMPTY_BLOCKS
    if budget < smallest:
        in_use = f" by default ({memory(memory_in_use())} are in use)" if kv_memory is None else ""
        raise ValueError(
            f"[Engine] kv_memory is {memory(budget)}{in_use}, but one block of {block_size} tokens "
            f"takes {memory(smallest)}: expected at least that"
        )
    return min(budget // one_block, most_blocks(plan, block_size))


def most_blocks(plan: PoolPlan, block_size: int) -> int:
    """Blocks that a pool can have: its arrays are limited, and its slots are int32."""
    longest = (longest_pool([array.shape], array.block_size) for array in plan.arrays)
    return min(*longest, MAX_INT32 // block_size, MAX_INT32)


def _check_held(kv_memory: int, longest: int, reserved: int) -> None:
    """Raise ValueError if the device cannot hold a pool of `kv_memory` bytes."""
    in_use = memory_in_use() + reserved
    left = max(0, device_memory() - in_use)
    if kv_memory > left:
        raise ValueError(
            f"[Engine] kv_memory is {memory(kv_memory)}, but the device can hold "
            f"{memory(device_memory())} and {memory(in_use)} are in use: expected at most "
            f"{memory(left)}"
        )
    if kv_memory > longest > 0:
        raise ValueError(
            f"[Engine] kv_memory is {memory(kv_memory)}, but an array of the pool would exceed "
            f"{memory(int(mx.device_info()['max_buffer_length']))}, the device's limit: expected "
            f"at most {memory(longest)}"
        )
