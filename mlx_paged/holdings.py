"""What of this process's memory is held for one purpose: a line of a ledger. Imports no mlx."""

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Holding(NamedTuple):
    """Memory that is held for one purpose.

    Attributes:
        name: of the purpose.
        num_bytes: that are held now.
        limit: bytes at most; None: nothing limits them by themselves.
        is_mlx: whether these bytes are among the arrays that MLX counts.
    """

    name: str
    num_bytes: int
    limit: int | None = None
    is_mlx: bool = False


Holder = Callable[[], Iterable[Holding]]
"""What tells its holdings now."""


def summed(holdings: Iterable[Holding]) -> list[Holding]:
    """One holding for each name. The limit of a sum is the sum of the limits, None if one of them
    is None."""
    found: dict[str, Holding] = {}
    for each in holdings:
        before = found.get(each.name)
        if before is not None:
            limit = None
            if before.limit is not None and each.limit is not None:
                limit = before.limit + each.limit
            size, is_mlx = before.num_bytes + each.num_bytes, before.is_mlx and each.is_mlx
            each = Holding(each.name, size, limit, is_mlx)
        found[each.name] = each
    return list(found.values())
