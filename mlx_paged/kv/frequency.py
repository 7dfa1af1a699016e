"""How often content is used, where a use counts less the longer ago it was. Knows no mlx.

The frequency of content at a time t is the sum of ``2 ** (t_i - t)`` over the times t_i of its
uses, in half-lives. Its score is ``log2(sum(2 ** t_i))``. Scores do not change while time passes,
so content keeps its place in an order by score until the content is used again (LRFU: Lee et al.
2001, IEEE Transactions on Computers 50(12)). Worth and frequency multiply: their logarithms add up.
"""

from math import log2

ONE = 1 << 32
"""Stands for 1 in scores and times, which are integers: their order is the same everywhere."""

_PARTS = 256
"""Entries of a table for a range of 1. They are rounded to 16 bits, so that they do not depend on
the last bits of a machine's ``log2``."""

_OF_MANTISSA = [round(log2(1 + i / _PARTS) * (1 << 16)) << 16 for i in range(_PARTS)]
_OF_DISTANCE = [round(log2(1 + 2 ** (-i / _PARTS)) * (1 << 16)) << 16 for i in range(16 * _PARTS)]


def log2_of(number: int) -> int:
    """The logarithm of an integer above 0, as a score; its error is at most 1/170."""
    exponent = number.bit_length() - 1
    return exponent * ONE + _OF_MANTISSA[((number * _PARTS) >> exponent) - _PARTS]


def together(one: int, other: int) -> int:
    """The score of what has the uses of two scores."""
    greater, distance = max(one, other), abs(one - other)
    index = distance * _PARTS // ONE
    return greater + (_OF_DISTANCE[index] if index < len(_OF_DISTANCE) else 0)
