"""What the memory of a pool holds now, and how much of it the process has."""

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.holdings import CountedBy, Holding
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.pool import KVPool
from mlx_paged.system_memory import resident_bytes


def pool_holdings(pool: KVPool, allocator: BlockAllocator) -> list[Holding]:
    """A pool as lines of a ledger: blocks that sequences hold, blocks that are only kept for later
    prompts, pinned or not, and memory that holds neither. On a CPU that memory is
    what earlier blocks touched; on a GPU it is the rest of the pool. Call this on
    the thread that computes."""
    store, size = allocator.store, pool.block_bytes
    live, idle = store.blocks_in_use * size, store.num_idle * size
    pinned = _pinned_idle(allocator) * size
    reserved = _touched_bytes(pool) if 0 < pool.nbytes <= ops.reserved_bytes() else None
    counted_by, taken = CountedBy.NOBODY, reserved
    if taken is None:
        counted_by, taken = CountedBy.MLX, pool.nbytes
    return [
        Holding("pool_live", live, pool.nbytes, counted_by),
        Holding("pool_pinned", pinned, pool.nbytes, counted_by),
        Holding("pool_idle", idle - pinned, pool.nbytes, counted_by),
        Holding("pool_unused", max(0, taken - live - idle), pool.nbytes, counted_by),
    ]


def array_bytes() -> int:
    """Bytes of all arrays and freed buffers of MLX, and of all pools that MLX does not count."""
    return mx.get_active_memory() + mx.get_cache_memory() + ops.reserved_bytes()


def _pinned_idle(allocator: BlockAllocator) -> int:
    """How many pinned blocks no sequence holds."""
    store = allocator.store
    if not store.idle.num_pinned:
        return 0
    return sum(
        store.width_of(known.block)
        for cache in store.prefixes
        for known in cache.by_block.values()
        if known.pinned_until and known.block in store.idle
    )


def _touched_bytes(pool: KVPool) -> int | None:
    """Bytes of a pool in address space of its own that are in memory; None: nobody tells."""
    found = [resident_bytes(*place) for place in pool.places()]
    known = [each for each in found if each is not None]
    return sum(known) if known and len(known) == len(found) else None
