"""What a model's recurrent layers keep of a sequence, and how much memory that takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from mlx_paged.kv.snapshot_memory import num_snapshots_for
from mlx_paged.kv.states import StateIds
from mlx_paged.options import PoolConfig
from mlx_paged.runner.layer_states import LayerStates
from mlx_paged.runner.recurrent_rows import RecurrentRows
from mlx_paged.runner.recurrent_states import RecurrentStates


@dataclass(frozen=True, slots=True)
class StateProfile:
    """What the recurrent layers of a model keep instead of K/V.

    Attributes:
        exist: whether the model has such layers, so that a sequence cannot be rewound.
        are_diverted: whether they can compute rows of sequences with different numbers of tokens.
        num_bytes: of a sequence's states in all such layers.
    """

    exist: bool
    are_diverted: bool
    num_bytes: int

    def on(self, model: nn.Module, caches: Sequence[Any]) -> LayerStates:
        """The states in these caches of the model's layers."""
        rows = RecurrentRows.of(model) if self.are_diverted else None
        return RecurrentStates([cache for cache in caches if isinstance(cache, ArraysCache)], rows)

    def planned(self, config: PoolConfig) -> "PlannedStates":
        """The states that an engine with these options may keep. Raises ValueError if its
        `snapshot_memory` is neither 0 nor enough for one snapshot."""
        most = 0
        if self.exist and config.prefix_cache:
            most = num_snapshots_for(self.num_bytes, config.max_running, config.snapshot_memory)
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
        return self.max_snapshots * self.profile.num_bytes

    def kind(self) -> StateIds | None:
        """The kind of the states, for an allocator; None: the model has none."""
        return StateIds(self.max_snapshots, self.profile.num_bytes) if self.profile.exist else None

    def decided(self, config: PoolConfig) -> PoolConfig:
        """Options with which another process plans as many states."""
        return replace(config, snapshot_memory=self.num_bytes)
