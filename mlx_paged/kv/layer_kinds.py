"""What a sequence keeps of the layers of one kind. Knows no mlx."""

from dataclasses import dataclass
from typing import Protocol


class LayerKind(Protocol):
    """What a sequence keeps of layers that store K/V, token by token.

    A kind says which tokens a later query of its layers may see. The block tables, the prefix
    cache and the tier follow.
    """

    @property
    def keeps_all(self) -> bool:
        """Whether a sequence keeps all tokens, so that a known prefix needs every block."""

    def kept_from(self, position: int) -> int:
        """The first token that a sequence keeps when its next token is at `position`. A kind keeps
        one token more than the query at `position` sees: the token before `position` can be
        computed again. The result never falls when `position` grows."""

    def reach(self, position: int, num_tokens: int, chunk: int) -> int:
        """The first token that a new sequence of `num_tokens` gets no block for yet. Its next token
        is at `position`, and a step computes at most `chunk` of its tokens."""

    def most_tokens(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Tokens whose blocks a sequence of `num_tokens` holds at one time, at most."""


class Full:
    """A query sees all tokens before it."""

    keeps_all = True

    def kept_from(self, position: int) -> int:
        return 0

    def reach(self, position: int, num_tokens: int, chunk: int) -> int:
        return num_tokens

    def most_tokens(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return num_tokens


@dataclass(frozen=True, slots=True)
class Window:
    """A query sees the last `size` tokens, its own token included."""

    size: int

    @property
    def keeps_all(self) -> bool:
        return False

    def kept_from(self, position: int) -> int:
        return max(0, position - self.size)

    def reach(self, position: int, num_tokens: int, chunk: int) -> int:
        return min(num_tokens, self.kept_from(position) + self.size + chunk)

    def most_tokens(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return min(num_tokens, self.size + chunk + 2 * block_size)


FULL = Full()
