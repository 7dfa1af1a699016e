"""At which positions a sequence leaves snapshots of its recurrent states. Knows no mlx."""

from collections.abc import Iterable

from mlx_paged.kv.snapshots import PARTS, Snapshot, Snapshots
from mlx_paged.kv.state_kind import Text

SMALLEST_GAP = 48
"""Tokens between two snapshots on the way at least: shorter pieces of a chunk take longer."""

PLENTY = 128
"""With fewer snapshots than this, those on the way are further apart."""


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
    - :func:`way_points`, if there is room, or snapshots of less value.

    All are at the ends of blocks: the disk keeps these, and other texts with the same blocks find
    them. Decodes take no snapshots: they would copy the states once per block.
    """
    if start == text.num_tokens - 1:
        return []  # a decode
    candidates = [without_state, *text.turn_ends]
    if not text.turn_ends or text.num_tokens > text.num_prompt:
        candidates.append(text.num_tokens - 1)
    ends = sorted({position // block_size * block_size for position in candidates})
    last = 0 if before is None else before.position
    parts = PARTS * min(1, kept.max_snapshots / PLENTY)
    spare = way_points(start, stop, last, [*ends, text.num_tokens], block_size, parts)
    wanted = [end for end in ends if start < end <= stop]
    snapshots = list[Snapshot]()
    for position in sorted({*wanted, *spare}):
        snapshot = Snapshot(position, is_spare=position not in wanted, before=before)
        if not snapshot.is_spare or kept.make_room(snapshot, len(snapshots)):
            snapshots.append(snapshot)
            before = snapshot
    return snapshots


def way_points(
    start: int, stop: int, last: int, ends: Iterable[int], block_size: int, parts: float
) -> list[int]:
    """Ends of blocks in ``(start, stop]`` at which snapshots are taken on the way. A text that has
    n tokens in common with this one then finds a state after about ``n * (1 - 1 / parts)`` of them
    or more. The positions are a geometric series: n tokens have about ``parts * log(n)`` of
    them.

    Args:
        last: position of the latest snapshot before `start`.
        ends: positions with snapshots of their own, sorted.
        stop: the end of a chunk, where a snapshot takes no time.
    """
    found, coming = list[int](), [end for end in ends if end > last]
    while True:
        gap = max(SMALLEST_GAP, int(last / max(parts - 1, 0.5)))
        end = next((end for end in coming if end > last), stop + 2 * gap)
        position = last + gap
        if position < end < position + gap // 2:
            position = (last + end) // 2  # two gaps of the same size instead of a short one
        position = max(position, max(start, last) + block_size) // block_size * block_size
        if position >= end:
            position = end
        elif position > stop >= max(last + 2 * gap // 3, start + 1) and stop % block_size == 0:
            position = stop
        if position > stop:
            return found
        if position < end:
            found.append(position)
        last = position
