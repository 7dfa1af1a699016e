"""Where requests leave snapshots of their recurrent states. Knows no mlx."""

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.snapshots import Snapshot
from mlx_paged.request import Request


class SnapshotPlan:
    """Which points of a request are worth a snapshot.

    - the last whole block of its prompt, which the next turn of a chat has in common with it even
      where the answer comes back changed;
    - where K/V of the prompt was known further than any state: there texts part that begin alike,
      such as those that share a system prompt;
    - its end, whose state is there for the taking;
    - the ends of a long prompt's chunks, while there is room for more snapshots.

    None is taken of decodes on their way: that would cost a copy of the states every block.

    Args:
        allocator: keeps the snapshots.
        max_snapshots: snapshots kept at most.
    """

    def __init__(self, allocator: BlockAllocator, max_snapshots: int) -> None:
        allocator.require_states(max_snapshots)
        self._allocator = allocator

    def stop(self, request: Request, start: int, stop: int) -> int:
        """Where a chunk ends that may go as far as `stop`: if more is to come, at the end of a
        block, unless that takes more than half of it away."""
        if stop == request.num_tokens:
            return stop
        whole = stop - stop % self._allocator.block_size
        return stop if 2 * (whole - start) < stop - start else whole

    def on_the_way(self, request: Request, start: int, stop: int) -> tuple[Snapshot, ...]:
        """Snapshots to take while ``[start, stop)`` is computed, by position."""
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
        """The request is about to free its blocks, whose content is known: its last states stay."""
        if request.synchronous or request.num_computed > len(request.tokens):
            return
        snapshot = Snapshot(request.num_computed)
        if self._allocator.attach_snapshot(request.id, request.tokens, snapshot):
            request.snapshot = snapshot
