"""What a scheduler holds and has done, in numbers. Knows no mlx."""

from collections.abc import Mapping
from typing import Any, NamedTuple


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
    reported: Mapping[str, Any]  # numbers of features: fields of the engine's stats
