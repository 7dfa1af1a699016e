"""Who gives its blocks back when a running request finds none. Knows no mlx."""

from collections.abc import Callable
from enum import StrEnum

from mlx_paged.request import Request


class VictimPolicy(StrEnum):
    """Which running request is preempted; it is computed again later, with the same outcome."""

    NEWEST = "newest"  # the last to arrive: the fewest steps are repeated, nobody starves
    LONGEST = "longest"  # the most tokens in the pool: the fewest preemptions
    FEWEST_GENERATED = "fewest-generated"  # the least visible progress is held up


_RANK: dict[VictimPolicy, Callable[[Request], int]] = {
    VictimPolicy.NEWEST: lambda request: 0,
    VictimPolicy.LONGEST: lambda request: request.num_computed,
    VictimPolicy.FEWEST_GENERATED: lambda request: -request.num_generated,
}


def choose_victim(candidates: list[Request], policy: VictimPolicy) -> Request:
    """The one to preempt: lowest priority first, then by policy, then the newest."""
    rank = _RANK[policy]
    return max(candidates, key=lambda request: (request.priority, rank(request), request.id))
