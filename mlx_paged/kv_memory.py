"""How large the pool is when nobody says."""

import os
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_paged.kv_pool import KVShape, block_bytes

GIB = 1 << 30
HOST_LIMIT = GIB // 2
NUM_EMPTY_BLOCKS = 1 << 16
SNAPSHOT_SHARE = 4
"""Snapshots of recurrent states take one part in so many of the memory to spare at most."""
SNAPSHOTS_PER_PLACE = 4
"""As many for each request that can run: a chat leaves two a turn."""


def default_kv_memory(model: nn.Module) -> int:
    """Bytes for K/V: with Metal nine tenths of the recommended working set less the weights, on a
    CPU a quarter of the memory but at most half a GiB."""
    if mx.default_device() == mx.Device(mx.gpu):
        recommended = int(mx.device_info().get("max_recommended_working_set_size", 4 * GIB))
        weights: int = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        return max(int(0.9 * recommended) - weights, recommended // 20)
    return min(physical_memory() // 4, HOST_LIMIT)


def physical_memory() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def num_blocks_for(
    model: nn.Module,
    shapes: Sequence[KVShape],
    block_size: int,
    kv_memory: int | None,
    reserved: int = 0,
) -> int:
    """How many blocks the budget in bytes holds, by default all that is to spare but `reserved`.

    Raises:
        ValueError: the budget holds not even one block, or the machine has less memory.
    """
    if kv_memory is not None and kv_memory > physical_memory():
        raise ValueError(
            f"[Engine] kv_memory is {kv_memory} bytes, but this machine has {physical_memory()}: "
            "expected less"
        )
    budget = default_kv_memory(model) - reserved if kv_memory is None else kv_memory
    one_block = block_bytes(shapes, block_size)
    if one_block == 0:  # a model of recurrent layers only: blocks are mere bookkeeping
        return NUM_EMPTY_BLOCKS
    if budget < one_block:
        raise ValueError(
            f"[Engine] kv_memory is {budget} bytes, but one block of {block_size} tokens takes "
            f"{one_block}: expected at least that"
        )
    return budget // one_block


def num_snapshots_for(
    model: nn.Module, state_bytes: int, max_running: int, snapshot_memory: int | None
) -> int:
    """How many snapshots of `state_bytes` each the budget in bytes holds.

    Raises:
        ValueError: the budget is negative, or neither 0 nor enough for one.
    """
    if snapshot_memory is None:
        affordable = default_kv_memory(model) // SNAPSHOT_SHARE // max(1, state_bytes)
        return max(1, min(SNAPSHOTS_PER_PLACE * max_running, affordable))
    if snapshot_memory and snapshot_memory < state_bytes:
        raise ValueError(
            f"[Engine] snapshot_memory is {snapshot_memory} bytes, but the recurrent states of one "
            f"sequence take {state_bytes}: expected at least that, or 0 for no snapshots"
        )
    return snapshot_memory // max(1, state_bytes)
