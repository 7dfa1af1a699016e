"""At which positions a sequence leaves snapshots of its recurrent states. Knows no mlx."""

from mlx_paged.kv.snapshots import Snapshot, Snapshots
from mlx_paged.kv.state_kind import Text


def chunk_stop(start: int, stop: int, num_tokens: int, block_size: int) -> int:
    """Where a chunk of at most ``[start, stop)`` ends. If tokens remain after it, it ends with a
    full block, unless that would more than halve it."""
    if stop == num_tokens:
        return stop
    whole = stop - stop % block_size
    return stop if 2 * (whole - start) < stop - start else whole


def snapshots_on_the_way(
    text: Text,
    start: int,
    stop: int,
    kept: Snapshots,
    block_size: int,
    before: Snapshot | None = None,  # the latest snapshot of the text
    without_state: int = 0,  # tokens of a known prefix that lacks its state at the end
) -> list[Snapshot]:
    """Snapshots to take while ``[start, stop)`` is computed, ordered by position.

    - Its turn ends, or the end of the last full block of a prompt without any: the next turn of a
      chat shares it, even if the client changed the answer.
    - The end of a known prefix that has no state: two prompts diverge there.
    - The ends of a long prompt's chunks, if there is room, or a snapshot of less value.

    All are at the ends of blocks: the disk keeps these, and other texts with the same blocks find
    them. Decodes take no snapshots: they would copy the states once per block.
    """
    if start == text.num_tokens - 1:
        return []  # a decode
    candidates = [without_state, *text.turn_ends]
    if not text.turn_ends or text.num_tokens > text.num_prompt:
        candidates.append(text.num_tokens - 1)
    ends = {position // block_size * block_size for position in candidates}
    wanted = sorted(end for end in ends if start < end <= stop)
    snapshots = list[Snapshot]()
    for position in wanted:
        before = Snapshot(position, before=before)
        snapshots.append(before)
    if stop < text.num_tokens and stop % block_size == 0 and stop not in wanted:
        spare = Snapshot(stop, is_spare=True, before=before)
        if kept.has_room(spare):
            snapshots.append(spare)
    return snapshots
