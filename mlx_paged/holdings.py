"""What of this process's memory is held for one purpose: a line of a ledger. Imports no mlx."""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple


class CountedBy(Enum):
    """Who else counts the bytes of a holding."""

    NOBODY = "nobody"  # memory that the system gave to this package itself
    MLX = "mlx"  # as arrays
    HEAP = "heap"  # the C library, as what it gave out


class Holding(NamedTuple):
    """Memory that is held for one purpose.

    Attributes:
        name: of the purpose.
        num_bytes: that are held now.
        limit: bytes at most; None: nothing limits them by themselves.
        counted_by: who else counts these bytes.
    """

    name: str
    num_bytes: int
    limit: int | None = None
    counted_by: CountedBy = CountedBy.NOBODY


Holder = Callable[[], Iterable[Holding]]
"""What tells its holdings now."""


def summed(holdings: Iterable[Holding]) -> list[Holding]:
    """One holding for each name. The limit of a sum is the sum of the limits, None if one of them
    is None. If different counts have the parts, nobody's has the sum."""
    found: dict[str, Holding] = {}
    for each in holdings:
        before = found.get(each.name)
        if before is not None:
            limit = None
            if before.limit is not None and each.limit is not None:
                limit = before.limit + each.limit
            counted_by = each.counted_by
            if counted_by is not before.counted_by:
                counted_by = CountedBy.NOBODY
            each = Holding(each.name, before.num_bytes + each.num_bytes, limit, counted_by)
        found[each.name] = each
    return list(found.values())
