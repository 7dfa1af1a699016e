"""The options of an engine, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

import mlx.nn as nn

from mlx_paged.arguments import (
    choice,
    integer,
    one_of,
    optional_integer,
    require,
    require_choices,
    require_flags,
    require_paths,
    require_positive,
)
from mlx_paged.options import MAX_DRAFTS, Policy, PreemptionPolicy
from mlx_paged.runner.model_probe import require_model
from mlx_paged.runner.pooled_model import PoolConfig
from mlx_paged.scheduler.ngram import NgramDrafter

DRAFTERS = {"ngram": NgramDrafter}  # what may guess tokens, by the value of `speculate`


@dataclass(frozen=True, kw_only=True)
class EngineConfig(PoolConfig):
    """All options of :class:`mlx_paged.Engine`, which has their meaning and their defaults.

    Raises:
        ValueError: an option is of a wrong kind or out of range.
    """

    max_stall_ms: float | None
    policy: Policy | str
    preempt: PreemptionPolicy | str
    seed: int | None
    lookahead: bool
    prewarm: bool | None
    speculate: str | None
    draft_model: nn.Module | None
    num_draft_tokens: int
    profile: bool
    metrics_jsonl: str | PathLike[str] | None
    spike_ms: float | None
    kv_disk_gb: float
    model_files: Sequence[str | PathLike[str]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take("seed", optional_integer, 0)
        self._take("num_draft_tokens", integer, 1, MAX_DRAFTS)
        for name in ("max_stall_ms", "spike_ms", "kv_disk_gb"):
            require_positive("Engine", name, getattr(self, name))
        object.__setattr__(self, "policy", choice("Engine", "policy", Policy, self.policy))
        victims = choice("Engine", "preempt", PreemptionPolicy, self.preempt)
        object.__setattr__(self, "preempt", victims)
        require_flags("Engine", lookahead=self.lookahead, profile=self.profile)
        require_choices("Engine", prewarm=self.prewarm)
        require_paths("Engine", metrics_jsonl=self.metrics_jsonl)
        if self.draft_model is not None:
            require_model("Engine", "draft_model", self.draft_model)
        speculate, has_draft = self.speculate, self.draft_model is not None
        known = speculate is None or (speculate in tuple(DRAFTERS) and not has_draft)
        names = f"None or, without a draft model, {one_of(DRAFTERS)}"
        require(known, "Engine", "speculate", speculate, names)
        if self.profile:  # the phases of a compiled step cannot be told apart
            object.__setattr__(self, "compile", False)
            object.__setattr__(self, "lookahead", False)
