"""At which positions requests save snapshots of their recurrent states. Knows no mlx."""

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.snapshots import Snapshot
from mlx_paged.request import Request


class SnapshotPlan:
    """Chooses the positions of a request that get a snapshot.

    - Its turn ends, or the end of the last full block of a prompt without any: the next turn of a
      chat shares it, even if the client changed the answer.
    - The end of a known prefix that has no state: two prompts diverge there.
    - The end of the request: its state needs no extra computation.
    - The ends of a long prompt's chunks, if there is room, or a snapshot of less value.

    All but the last are at the ends of blocks: the disk keeps these, and other texts with the same
    blocks find them. Decodes take no snapshots: they would copy the states once per block.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
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
        block_size, kept = self._allocator.block_size, self._allocator.snapshots
        states = self._allocator.states_of(request.id)
        candidates = [states.without_state, *request.turn_ends]
        if not request.turn_ends or request.num_tokens > request.num_prompt:
            candidates.append(request.num_tokens - 1)
        ends = {position // block_size * block_size for position in candidates}
        wanted = sorted(end for end in ends if start < end <= stop)
        snapshots, before = list[Snapshot](), states.snapshot
        for position in wanted:
            before = Snapshot(position, before=before)
            snapshots.append(before)
        if stop < request.num_tokens and stop % block_size == 0 and stop not in wanted:
            spare = Snapshot(stop, is_spare=True, before=before)
            if kept is not None and kept.has_place(spare):
                snapshots.append(spare)
        return tuple(snapshots)

    def at_the_end(self, request: Request) -> None:
        """Keep the last states of a request that will free its registered blocks."""
        if request.num_computed > len(request.tokens):
            return
        self._allocator.keep_state(request.id, request.keys)
