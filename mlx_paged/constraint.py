"""What may say which tokens a request gets next, and what the engine asks of it. Knows no mlx."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

from mlx_paged.sampling_params import SamplingParams

if TYPE_CHECKING:  # --help imports no numpy
    import numpy as np
    import numpy.typing as npt


class Constraint(Protocol):
    """What the generated tokens of one request follow. It has followed the first of them, and goes
    on to the newest one when it is asked."""

    def copy(self, tokens: Sequence[int]) -> Self:
        """The constraint of a fork with these tokens, which begin with those that this one has
        followed. Raises ValueError if it does not allow one of them."""

    def ahead(self, tokens: Sequence[int]) -> Sequence[int]:
        """Tokens that must follow the request's `tokens`, and that the request is to get at once;
        empty if there are none, or if it does not allow one of `tokens`."""

    @classmethod
    def masks(
        cls, rows: "Sequence[Row[Self]]", vocab: int
    ) -> "tuple[npt.NDArray[np.uint32], dict[int, Exception]]":
        """The tokens that constraints of this class allow in some rows, which it may compute
        together: a bit for each token, the lowest one first, ``[N, ceil(vocab / 32)]``, of these
        rows in their order; and by :attr:`Row.row` why there is no token."""


ConstraintT = TypeVar("ConstraintT", bound=Constraint)


class Row(NamedTuple, Generic[ConstraintT]):
    """A row of logits for the token at index `length` of a request's tokens."""

    row: int  # in the batch
    constraint: ConstraintT
    tokens: list[int]
    length: int
    # The last of `tokens` may never be the request's: a copy of the constraint follows the tokens.
    is_tentative: bool = False


class Constraints(Protocol):
    """Makes the constraints of requests. Any thread may call it."""

    def start(self, params: SamplingParams, position: int) -> Constraint | None:
        """The constraint of a request whose tokens from `position` on follow it; None if `params`
        ask for none. Raises ValueError as :meth:`compile`."""

    def compile(self, params: SamplingParams) -> Any:
        """Prepare what `params` ask for, which can take seconds: :meth:`start` is fast then. Raises
        ValueError for what cannot be followed."""

    def knows(self, params: SamplingParams) -> bool:
        """Whether :meth:`compile` has nothing to do."""

    def warm_up(self) -> None:
        """Prepare what all constraints need."""
