"""Which part of each linear layer this process has, where several processes divide a model."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed

from mlx_paged.runner.skip_unsampled import attached_to

INPUTS, OUTPUTS = -1, -2
"""Axes of a weight ``[..., O, I]``."""
_AXES = {"all-to-sharded": OUTPUTS, "sharded-to-all": INPUTS}

Segments = int | Sequence[int] | Sequence[float]
"""As ``mx.split`` takes them, or parts of the whole from 0 to 1."""


@dataclass(frozen=True)
class Cut:
    """How a layer's inputs or outputs are divided: each segment into as many parts as there are
    processes.

    Attributes:
        axis: `INPUTS` or `OUTPUTS`.
    """

    axis: int
    segments: Segments
    num_parts: int

    def ranges(self, size: int, part: int) -> list[tuple[int, int]]:
        """Which of the `size` inputs or outputs a process has: from where to where."""
        segments = self.segments
        if isinstance(segments, int):
            ends = [size * (i + 1) // segments for i in range(segments)]
        else:
            ends = [int(e * size) if isinstance(e, float) else e for e in segments] + [size]
        found = []
        for start, stop in pairwise([0, *ends]):
            width = (stop - start) // self.num_parts
            found.append((start + part * width, start + (part + 1) * width))
        return found


@dataclass
class Cuts:
    """How several processes divide a model.

    Attributes:
        own: the number of this process.
        by_path: of the layers of which each process has a part.
        unknown: paths of layers that are divided in another way.
    """

    own: int = 0
    by_path: Mapping[str, Cut] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()


def cuts_of(model: nn.Module) -> Cuts:
    """How the processes divide a model; no layer is divided if this one has all of it."""
    return attached_to(model, "cuts", lambda model: Cuts())


@contextmanager
def noting_cuts(model: nn.Module, group: mx.distributed.Group) -> Iterator[None]:
    """Within this context a model's ``shard`` divides it; :func:`cuts_of` knows how from then on.

    What MLX's two functions divide is noted. A layer of another shape than before that they have
    not divided alone is unknown."""
    before = _shapes(model)
    found: dict[int, tuple[nn.Module, tuple[int, ...], Cut]] = {}

    def note(shard: Callable[..., Any], module: Any, sharding: Any, **how: Any) -> Any:
        weight = module.get("weight")
        result = shard(module, sharding, **how)
        if isinstance(weight, mx.array):
            axis, segments = _axis_of(sharding, weight, how.get("segments", 1))
            layer = module if result is None else result
            if axis is not None:
                found[id(layer)] = layer, weight.shape, Cut(axis, segments, group.size())
        return result

    replaced = list[tuple[Any, Any]]()
    for name in sorted({type(module).__module__ for module in model.modules()}):
        for shard in (distributed.shard_linear, distributed.shard_inplace):
            if getattr(sys.modules.get(name), shard.__name__, None) is shard:
                replaced.append((sys.modules[name], shard))
    try:
        for owner, shard in replaced:
            setattr(owner, shard.__name__, partial(note, shard))
        yield
    finally:
        for owner, shard in replaced:
            setattr(owner, shard.__name__, shard)
    cuts, unknown = dict[str, Cut](), set[str]()
    for path, module in model.named_modules():
        _, shape, cut = found.get(id(module), (None, None, None))
        whole = before.get(path)
        if cut is not None and shape == whole:
            cuts[path] = cut
        elif cut is not None or whole != _shape(module):
            unknown.add(path)
    kept = cuts_of(model)
    kept.own, kept.by_path, kept.unknown = group.rank(), cuts, frozenset(unknown)


def _axis_of(sharding: Any, weight: mx.array, segments: Segments) -> tuple[int | None, Segments]:
    """The axis that is divided, and its segments; None: neither inputs nor outputs are."""
    if isinstance(sharding, str):
        return _AXES[sharding], segments
    asked = sharding("weight", weight)
    axis, segments = asked if isinstance(asked, tuple) else (asked, 1)
    if axis is not None and axis >= 0:
        axis -= weight.ndim
    return axis if axis in (INPUTS, OUTPUTS) else None, segments


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    return {path: _shape(module) for path, module in model.named_modules()}


def _shape(module: nn.Module) -> tuple[int, ...] | None:
    weight = module.get("weight")
    return weight.shape if isinstance(weight, mx.array) else None
