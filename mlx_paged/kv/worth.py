"""What known content is worth: operations to compute it again, per byte. Knows no mlx."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

UNIT = "operations per KiB"
"""The unit of all worths. They are integers, so no worth depends on a machine's arithmetic."""

KIB = 1 << 10


class Pairs(NamedTuple):
    """Layers whose attention sees the same tokens.

    Attributes:
        most: tokens that a query sees at most, its own included; None: all up to its own.
        operations: of these layers for a query and a key, in all heads.
    """

    most: int | None
    operations: int


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of a model for the tokens of a text, from the shapes of its layers.

    Attributes:
        token: of a token, wherever it is.
        pairs: of attention, which sees more tokens the later a token is.
    """

    token: int
    pairs: Sequence[Pairs] = ()

    def before(self, position: int) -> int:
        """Operations of the first `position` tokens of a text."""
        total = self.token * position
        for most, operations in self.pairs:
            near = position if most is None else min(position, most)
            seen = near * (near + 1) // 2 + (position - near) * (most or 0)
            total += operations * seen
        return total

    def of(self, start: int, stop: int) -> int:
        """Operations of the tokens at positions ``[start, stop)``."""
        return self.before(stop) - self.before(start)


def worth(operations: int, num_bytes: int) -> int:
    """The worth of content of so many bytes that takes so many operations to compute, in
    :data:`UNIT`; at least 1."""
    return max(1, KIB * operations // max(1, num_bytes))


@dataclass(frozen=True, slots=True)
class TextWorth:
    """What the parts of a text are worth.

    Attributes:
        work: of the model that computes the text.
        block_bytes: of a block of tokens in all layer groups: a text goes on only after a block
            that all of them have.
        kept_bytes: of the recurrent states after a token, as they are kept.
    """

    work: Work
    block_bytes: int
    kept_bytes: int = 0

    def of_block(self, start: int, stop: int) -> int:
        """The worth of a block with the tokens ``[start, stop)`` of a text."""
        return worth(self.work.of(start, stop), self.block_bytes)

    def of_states(self, position: int) -> int:
        """The worth of recurrent states after so many tokens, if no earlier ones are kept."""
        return worth(self.work.before(position), self.kept_bytes)


TOKENS = TextWorth(Work(1), KIB, KIB)
"""Of a model of which nothing is known: an operation a token."""
