"""What a model's recurrent layers keep of a sequence, and how much memory that takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from mlx_paged.arguments import require
from mlx_paged.kv.eight_bits import num_stored_bytes
from mlx_paged.kv.snapshot_memory import num_snapshots_for
from mlx_paged.kv.states import StateIds
from mlx_paged.kv.worth import TextWorth
from mlx_paged.options import PoolConfig
from mlx_paged.runner.layer_states import LayerStates
from mlx_paged.runner.recurrent_rows import RecurrentRows
from mlx_paged.runner.recurrent_states import RecurrentStates

LAYOUT = "8 bits, a scale for each row"
"""Names the format of :class:`StoredStates`, for those who keep states from one process to the
next."""


@dataclass(frozen=True, slots=True)
class StateProfile:
    """What the recurrent layers of a model keep instead of K/V.

    Attributes:
        exist: whether the model has such layers, so that a sequence cannot be rewound.
        are_diverted: whether they can compute rows of sequences with different numbers of tokens.
        num_elements: of a sequence's states in all such layers.
        num_bytes: of these states.
        bytes_in_8_bits: of these states with 8 bits an element.
        are_in_8_bits: whether states that are kept for later prompts are stored so.
    """

    exist: bool
    are_diverted: bool
    num_elements: int
    num_bytes: int
    bytes_in_8_bits: int
    are_in_8_bits: bool = False

    @classmethod
    def of(cls, states: Sequence[ArraysCache], are_diverted: bool) -> "StateProfile":
        """The profile of a model whose recurrent layers keep `states` of one sequence."""
        arrays: list[mx.array] = [a for leaf in states for a in leaf.cache if a is not None]
        num_bytes = sum(a.nbytes for a in arrays)
        in_8_bits = sum(map(num_stored_bytes, arrays))
        return cls(bool(states), are_diverted, sum(a.size for a in arrays), num_bytes, in_8_bits)

    def stored_by(self, config: PoolConfig) -> "StateProfile":
        """The profile with states that are kept as the options say. Raises ValueError if there are
        none that could be."""
        bits = config.snapshot_bits
        if bits is not None:
            expected = "None: the model has no recurrent layers"
            require(self.exist, "Engine", "snapshot_bits", bits, expected)
        return replace(self, are_in_8_bits=bits is not None)

    @property
    def kept_bytes(self) -> int:
        """Bytes of a sequence's states that are kept for later prompts."""
        return self.bytes_in_8_bits if self.are_in_8_bits else self.num_bytes

    def on(self, model: nn.Module, caches: Sequence[Any]) -> LayerStates:
        """The states in these caches of the model's layers."""
        rows = RecurrentRows.of(model) if self.are_diverted else None
        own = [cache for cache in caches if isinstance(cache, ArraysCache)]
        return RecurrentStates(own, rows, self.are_in_8_bits)

    def planned(self, config: PoolConfig) -> "PlannedStates":
        """The states that an engine with these options may keep. Raises ValueError if its
        `snapshot_memory` is neither 0 nor enough for one snapshot."""
        most = 0
        if self.exist and config.prefix_cache:
            most = num_snapshots_for(self.kept_bytes, config.max_running, config.snapshot_memory)
        return PlannedStates(self, most)


@dataclass(frozen=True, slots=True)
class PlannedStates:
    """The states that the prefix cache of an engine may keep.

    Attributes:
        profile: of the model.
        max_snapshots: states at most.
    """

    profile: StateProfile
    max_snapshots: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return self.max_snapshots * self.profile.kept_bytes

    def kind(self, worth: TextWorth) -> StateIds | None:
        """The kind of the states, for an allocator; None: the model has none. `worth` is that of
        the parts of a text."""
        profile = self.profile
        if not profile.exist:
            return None
        layout = LAYOUT if profile.are_in_8_bits else ""
        return StateIds(self.max_snapshots, profile.num_bytes, profile.kept_bytes, layout, worth)

    def decided(self, config: PoolConfig) -> PoolConfig:
        """Options with which another process plans as many states."""
        return replace(config, snapshot_memory=self.num_bytes)
