"""What a runner asks of layers that keep states of a sequence beside K/V."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx

from mlx_paged.kv.state_kind import StateKind
from mlx_paged.kv.worth import TextWorth
from mlx_paged.options import PoolConfig
from mlx_paged.scheduler.step import Span

LayerState = list[mx.array | None]
States = list[LayerState]
"""The states of one or of several sequences, layer by layer."""

Forms = tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]
"""Shapes and dtypes of all arrays of states, without the axis along which sequences are joined."""


class LayerStates(Protocol):
    """The arrays of states, by the ids that steps give them.

    Attributes:
        exist: whether the model has layers with states.
        takes_rows: whether the layers compute rows of sequences with different numbers of tokens.
        loaded: the states that the model's caches have.
    """

    exist: bool
    takes_rows: bool

    @property
    def loaded(self) -> States: ...
    @loaded.setter
    def loaded(self, states: States) -> None: ...

    @property
    def loaded_arrays(self) -> list[mx.array]:
        """The arrays of `loaded`."""

    @property
    def loaded_forms(self) -> Forms:
        """The forms of `loaded`."""

    def load(self, state_ids: Sequence[int]) -> None:
        """Put these states into the model's caches."""

    def load_zeros(self, forms: Forms, rows: int) -> None:
        """Put zeros into the model's caches, as states of these forms."""

    def alike(self, spans: Iterable[Span]) -> set[int]:
        """The ids of the requests of the largest group of spans that one forward can compute."""

    def have(self, spans: Iterable[Span], forms: Forms) -> bool:
        """Whether the states with which these spans begin have these forms."""

    def computing(
        self, spans: Sequence[Span], are_rows: bool, num_empty: int = 0, /
    ) -> AbstractContextManager[None]:
        """A context of a forward of these spans and of `num_empty` rows of nobody. The forward
        begins with the states that the spans read. The states that they leave are kept."""

    def left_by(self, spans: Iterable[Span], layers: Sequence[int] | None = None) -> list[mx.array]:
        """The arrays of all states that the spans leave; with `layers` those of some layers."""

    def layers_of(self, caches: Sequence[Any]) -> list[int]:
        """Which of the layers with states use one of these caches of the model."""

    def release(self, state_ids: Iterable[int]) -> None:
        """Forget states. Ids of states that were never computed are ignored."""

    def rest(self, state_ids: Iterable[int]) -> None:
        """Store states in fewer bytes with the next :meth:`separate`, unless they are forgotten
        before it."""

    def separate(self, spans: Sequence[Span] = ()) -> list[mx.array]:
        """Copy states out of arrays that they share with others, because a row keeps the rows
        beside it in memory. States that `spans`, which were computed now, read or leave at their
        ends stay where they are. Returns the new arrays, which are not evaluated."""

    def copied_out(self, state_id: int) -> tuple[list[mx.array], Callable[[], bytes]]:
        """The arrays of a copy of a state, and what reads the copy once these are evaluated."""

    def put_back(self, state_id: int, content: bytes) -> list[mx.array]:
        """Keep a state that :meth:`copied_out` has read under an id. Returns its arrays."""

    def clear(self) -> None:
        """Forget every state and empty the model's caches."""


class StateMemory(Protocol):
    """The memory of the states that the prefix cache of an engine may keep."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""

    def kind(self, worth: TextWorth) -> StateKind | None:
        """The kind of the states, for an allocator; None: the model has none. `worth` is that of
        the parts of a text."""

    def decided(self, config: PoolConfig) -> PoolConfig:
        """Options with which another process keeps as many states."""
