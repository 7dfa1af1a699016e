"""Which layers share a block table, and which share arrays of the pool. Knows no mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING

from mlx_paged.kv.layer_kinds import FULL, LayerKind, Window

if TYPE_CHECKING:
    from mlx_paged.kv.shapes import KVShape


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of the same kind: a sequence keeps the same tokens in all of them.

    A sequence has one block table for each group. An entry of the table stands for `block_size`
    tokens in all layers of the group. The K/V of an entry fills `width` blocks of the pool; the
    table has the number of the first of these blocks.
    """

    # The most tokens that a query of these layers sees, its own token included; None: all tokens.
    window: int | None = None
    # How many layers of the group share one array. Each of these layers fills blocks of its own.
    members: int = 1
    pieces: int = 1  # how many blocks the `block_size` tokens of one of these layers fill
    custom: LayerKind | None = None  # None: `window` says the kind
    # What a sequence keeps of these layers.
    kind: LayerKind = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_window = FULL if self.window is None else Window(self.window)
        object.__setattr__(self, "kind", self.custom or by_window)

    @property
    def keeps_all(self) -> bool:
        return self.kind.keeps_all

    @property
    def width(self) -> int:
        """Blocks of the pool for one entry."""
        return self.members * self.pieces

    def kept_from(self, position: int) -> int:
        return self.kind.kept_from(position)

    def reach(self, position: int, num_tokens: int, chunk: int) -> int:
        return self.kind.reach(position, num_tokens, chunk)

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at one time, at most."""
        return self.width * -(-self.kind.most_tokens(num_tokens, chunk, block_size) // block_size)


ONE_GROUP = (LayerGroup(),)


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """A pair of arrays of the pool, one of keys and one of values."""

    shape: KVShape  # what the layers of this pair store
    block_size: int  # token slots in a block
    memory: int  # pairs with the same number are views of the same memory
    groups: set[int] = field(default_factory=set)  # the layer groups whose blocks the pair holds


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's K/V is."""

    array: int  # index of the layer's pair of arrays
    group: int  # index of the layer's group
    # Index of the layer's block table in a batch. Each member of a group has a table of blocks:
    # first those of the first group, then those of the second group, and so on.
    table: int


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How the layers of a model share a pool. `places` has None for layers that store nothing."""

    groups: tuple[LayerGroup, ...]
    arrays: tuple[ArrayPlan, ...]
    places: tuple[LayerPlace | None, ...]

    @property
    def width(self) -> int:
        """Blocks of the pool that hold `block_size` tokens in all layers."""
        return sum(group.width for group in self.groups)


def plan_pool(
    shapes: Sequence[KVShape | None],  # what each layer stores; None: nothing
    windows: Sequence[int | None],  # the window of each layer; None: a query sees all tokens
    block_size: int,
    shares: bool = True,
) -> PoolPlan:
    """Put layers of the same window into a group. All groups share one budget.

    Layers of different groups share arrays, as in vLLM's hybrid KV cache manager. The number of
    arrays divides the number of layers of each group, so there is no padding. A layer whose tokens
    take n times the bytes of the smallest layer's has blocks of ``block_size / n`` tokens. If the
    bytes of the layers do not allow this, or if not `shares`, there is one group, and it has the
    widest window.
    """
    used = [layer for layer, shape in enumerate(shapes) if shape is not None]
    by_window: dict[int | None, list[int]] = {}
    for layer in used:
        by_window.setdefault(windows[layer], []).append(layer)
    pieces = _pieces(shapes, list(by_window.values()), block_size) if shares else None
    if pieces is None:
        widest = None if None in by_window else max((w for w in by_window if w), default=None)
        num_arrays = max(1, len(used))
        groups = {LayerGroup(widest): used}
    else:
        num_arrays = gcd(*map(len, by_window.values()))
        groups = {
            LayerGroup(window, len(layers) // num_arrays, count): layers
            for (window, layers), count in zip(by_window.items(), pieces, strict=True)
        }
    in_order = sorted(groups, key=lambda group: group.window or 0)  # all tokens first
    arrays: dict[tuple[int, KVShape], ArrayPlan] = {}
    places: list[LayerPlace | None] = [None] * len(shapes)
    num_tables = 0
    for index, group in enumerate(in_order):
        for i, layer in enumerate(groups[group]):
            shape = shapes[layer]
            assert shape is not None
            member, memory = divmod(i, num_arrays)
            plan = ArrayPlan(shape, block_size // group.pieces, memory)
            arrays.setdefault((memory, shape), plan).groups.add(index)
            array = list(arrays).index((memory, shape))
            places[layer] = LayerPlace(array, index, num_tables + member)
        num_tables += group.members
    return PoolPlan(tuple(in_order), tuple(arrays.values()), tuple(places))


def _pieces(
    shapes: Sequence[KVShape | None], groups: Sequence[Sequence[int]], block_size: int
) -> list[int] | None:
    """For each group n, where its layers have n times the bytes of the smallest layers. None if
    there are fewer than two groups, or if the groups cannot share arrays."""
    of_groups = [{shape for i in layers if (shape := shapes[i]) is not None} for layers in groups]
    if len(groups) < 2 or any(len(alike) > 1 for alike in of_groups):
        return None
    alike = [shape for (shape,) in of_groups]
    sizes = [[shape.n_kv_heads * dim for dim in shape.row_dims] for shape in alike]
    smallest = min(sizes)
    counts = [k // smallest[0] for k, _ in sizes]
    can_share = (
        len({shape.dtype for shape in alike}) == 1
        and not any(shape.latent for shape in alike)
        and all(size == [n * k for k in smallest] for size, n in zip(sizes, counts, strict=True))
        and all(block_size % n == 0 for n in counts)
    )
    return counts if can_share else None
