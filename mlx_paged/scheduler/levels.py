"""What a scheduler holds and has done, in numbers. Knows no mlx."""

from typing import NamedTuple


class Levels(NamedTuple):
    """Levels at present, and counters since the scheduler began."""

    running: int  # requests
    waiting: int  # requests in the queue, and those that wait for the tier
    blocks_in_use: int
    blocks_cached: int
    preemptions: int
    cow_clones: int
    evictions: int
    prefix_hit_tokens: int
    drafts: int
    accepted_drafts: int
    drafts_by_depth: list[list[int]]  # at each depth those computed, and those that were right
