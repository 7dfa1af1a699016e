"""How many snapshots of recurrent states there may be."""

from mlx_paged.arguments import memory
from mlx_paged.kv.default_pool import largest_default

SNAPSHOT_SHARE = 4  # default: snapshots of recurrent states take at most 1/4 of the pool's memory
SNAPSHOTS_PER_REQUEST = 4  # default, for each request that can run: a chat leaves two a turn


def num_snapshots_for(state_bytes: int, max_running: int, snapshot_memory: int | None) -> int:
    """How many snapshots of `state_bytes` each the budget in bytes holds. Raises ValueError if the
    budget is neither 0 nor enough for one."""
    if snapshot_memory is None:
        affordable = largest_default() // SNAPSHOT_SHARE // max(1, state_bytes)
        return max(1, min(SNAPSHOTS_PER_REQUEST * max_running, affordable))
    if snapshot_memory and snapshot_memory < state_bytes:
        raise ValueError(
            f"[Engine] snapshot_memory is {memory(snapshot_memory)}, but the recurrent states of "
            f"one sequence take {memory(state_bytes)}: expected at least that, or 0 for none"
        )
    return snapshot_memory // max(1, state_bytes)
