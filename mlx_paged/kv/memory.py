"""How large the pool is when nobody says, and how large it can be."""

import os
import threading
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, finalize

import mlx.core as mx

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.pool import KVShape, block_bytes

GIB = 1 << 30
HOST_LIMIT = GIB // 2
GPU_SHARE = 0.85
"""Pools are sized so that all arrays together fill this part of the working set that Metal
recommends. From 0.95 of it on, MLX releases cached buffers at every allocation that the cache
cannot serve. The tenth in between is for the arrays of a step and for that cache."""
NUM_EMPTY_BLOCKS = 1 << 16
SNAPSHOT_SHARE = 4
"""Snapshots of recurrent states take one part in so many of the memory to spare at most."""
SNAPSHOTS_PER_PLACE = 4
"""As many for each request that can run: a chat leaves two a turn."""

_with_snapshots: WeakKeyDictionary[BlockAllocator, int] = WeakKeyDictionary()
_lock = threading.Lock()  # guards _with_snapshots


def physical_memory() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def working_set() -> int | None:
    """Bytes that Metal recommends to hold at most; None on a CPU."""
    size = mx.device_info().get("max_recommended_working_set_size")
    return None if size is None else int(size)


def device_memory() -> int:
    """Bytes that the default device can hold."""
    return working_set() or physical_memory()


def memory_in_use() -> int:
    """Bytes of all evaluated arrays of this process, and of snapshots that are yet to be taken."""
    with _lock:
        promised = sum(
            state_bytes * (snapshots.max_snapshots - len(snapshots))
            for allocator, state_bytes in _with_snapshots.items()
            if (snapshots := allocator.snapshots) is not None
        )
    return mx.get_active_memory() + promised


def spare_memory() -> int:
    """Bytes that K/V may take on top of what is in use: on a GPU up to `GPU_SHARE` of the
    recommended working set, on a CPU up to half of the memory."""
    recommended = working_set()
    limit = physical_memory() // 2 if recommended is None else int(GPU_SHARE * recommended)
    return max(0, limit - memory_in_use())


def default_kv_memory() -> int:
    """Bytes of a pool that is allocated at once: on a GPU all that can be spared, on a CPU a
    quarter of the memory but at most half a GiB."""
    if working_set() is None:
        return min(physical_memory() // 4, HOST_LIMIT)
    return spare_memory()


def longest_pool(shapes: Sequence[KVShape], block_size: int) -> int:
    """How many blocks a pool can have: Metal bounds the length of each array."""
    max_length = mx.device_info().get("max_buffer_length")
    longest = block_size * max((shape.array_bytes for shape in shapes), default=0)
    return 1 << 62 if max_length is None or longest == 0 else int(max_length) // longest


def num_blocks_for(
    shapes: Sequence[KVShape], block_size: int, kv_memory: int | None, reserved: int = 0
) -> int:
    """How many blocks the budget in bytes holds. The weights must be evaluated before.

    Args:
        kv_memory: the budget; None: the default less `reserved`, as far as arrays can be that long.
        reserved: bytes that snapshots are going to take.

    Raises:
        ValueError: the budget holds not even one block, or the device cannot hold the budget.
    """
    one_block = block_bytes(shapes, block_size)
    most = longest_pool(shapes, block_size)
    if kv_memory is not None:
        _check_held(kv_memory, most * one_block, reserved)
    budget = max(0, default_kv_memory() - reserved) if kv_memory is None else kv_memory
    if one_block == 0:  # a model of recurrent layers only: blocks are mere bookkeeping
        return NUM_EMPTY_BLOCKS
    if budget < one_block:
        source = "" if kv_memory is not None else f" by default ({memory_in_use()} are in use)"
        raise ValueError(
            f"[Engine] kv_memory is {budget} bytes{source}, but one block of {block_size} tokens "
            f"takes {one_block}: expected at least that"
        )
    return min(budget // one_block, most)


def _check_held(kv_memory: int, longest: int, reserved: int) -> None:
    """Raise ValueError if the device cannot hold a pool of `kv_memory` bytes."""
    in_use = memory_in_use() + reserved
    left = max(0, device_memory() - in_use)
    if kv_memory > left:
        raise ValueError(
            f"[Engine] kv_memory is {kv_memory} bytes, but the device can hold {device_memory()} "
            f"and {in_use} are in use: expected at most {left}"
        )
    if kv_memory > longest > 0:
        raise ValueError(
            f"[Engine] kv_memory is {kv_memory} bytes, but an array of the pool would exceed "
            f"{mx.device_info()['max_buffer_length']}, the device's limit: expected at most "
            f"{longest}"
        )


def num_snapshots_for(state_bytes: int, max_running: int, snapshot_memory: int | None) -> int:
    """How many snapshots of `state_bytes` each the budget in bytes holds.

    Raises:
        ValueError: the budget is negative, or neither 0 nor enough for one.
    """
    if snapshot_memory is None:
        affordable = default_kv_memory() // SNAPSHOT_SHARE // max(1, state_bytes)
        return max(1, min(SNAPSHOTS_PER_PLACE * max_running, affordable))
    if snapshot_memory and snapshot_memory < state_bytes:
        raise ValueError(
            f"[Engine] snapshot_memory is {snapshot_memory} bytes, but the recurrent states of one "
            f"sequence take {state_bytes}: expected at least that, or 0 for no snapshots"
        )
    return snapshot_memory // max(1, state_bytes)


def promise_snapshots(allocator: BlockAllocator, state_bytes: int) -> None:
    """Count the snapshots that `allocator` has room for as in use before they are taken, while it
    lives."""
    with _lock:
        _with_snapshots[allocator] = state_bytes


class _WiredLimit:
    """MLX's wired limit, one for the process, and how many hold it up.

    A holder can die, and release its hold, in the midst of :meth:`hold` on the same thread. So
    that thread can take the lock again, and the new holder is counted before the limit changes.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders = 0
        self._before: int | None = None  # the limit to restore; None: it is not raised

    def hold(self, recommended: int) -> None:
        with self._lock:
            self._holders += 1
            if self._before is None:
                self._before = mx.set_wired_limit(recommended)

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._before is not None:
                try:
                    mx.synchronize()  # the limit must not sink while the device computes
                finally:
                    mx.set_wired_limit(self._before)
                    self._before = None


_limit = _WiredLimit()


def hold_wired_limit(owner: object) -> Callable[[], object] | None:
    """Let MLX keep as much memory wired as Metal recommends, until `owner` dies or the function
    that this returns is called. When the last of several owners is gone, the limit is again what it
    was before the first. On a CPU nothing happens, and None is returned.
    """
    recommended = working_set()
    if recommended is None:
        return None
    _limit.hold(recommended)
    release = finalize(owner, _limit.release)
    release.atexit = False
    return release
