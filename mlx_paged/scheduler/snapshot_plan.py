"""At which positions requests save snapshots of their recurrent states. Knows no mlx."""

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.snapshots import Snapshot
from mlx_paged.request import Request


class SnapshotPlan:
    """Chooses the positions of a request that get a snapshot.

    - The end of the last full block of its prompt: the next turn of a chat shares it, even if the
      client changed the answer.
    - The end of a known prefix that has no state: prompts that share a system prompt, for example,
      diverge there.
    - The end of the request: its state needs no extra computation.
    - The ends of a long prompt's chunks, while there is room for more snapshots.

    Decodes take no snapshots: they would copy the states once per block.
    """

    def __init__(self, allocator: BlockAllocator, max_snapshots: int) -> None:
        allocator.prefixes.require_states(max_snapshots)
        self._allocator = allocator

    def stop(self, request: Request, start: int, stop: int) -> int:
        """Where a chunk of at most ``[start, stop)`` ends. If tokens remain after it, it ends
        with a full block, unless that would more than halve it."""
        if stop == request.num_tokens:
            return stop
        whole = stop - stop % self._allocator.block_size
        return stop if 2 * (whole - start) < stop - start else whole

    def on_the_way(self, request: Request, start: int, stop: int) -> tuple[Snapshot, ...]:
        """Snapshots to take while ``[start, stop)`` is computed, ordered by position."""
        if start == request.num_tokens - 1:
            return ()  # a decode
        block_size = self._allocator.block_size
        last = (request.num_tokens - 1) // block_size * block_size
        candidates = (request.prefix_without_state, last)
        wanted = {position for position in candidates if start < position <= stop}
        snapshots = [Snapshot(position) for position in sorted(wanted)]
        if stop < request.num_tokens and stop % block_size == 0 and stop not in wanted:
            kept = self._allocator.snapshots
            if kept is not None and not kept.is_full:
                snapshots.append(Snapshot(stop, is_spare=True))
        return tuple(snapshots)

    def at_the_end(self, request: Request) -> None:
        """Keep the last states of a request that will free its registered blocks."""
        if request.synchronous or request.num_computed > len(request.tokens):
            return
        snapshot = Snapshot(request.num_computed)
        if self._allocator.attach_snapshot(request.id, request.keys, snapshot):
            request.snapshot = snapshot
