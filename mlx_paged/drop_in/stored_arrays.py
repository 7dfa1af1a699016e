"""Keys and values of paged caches as arrays with the shapes that mlx-lm's caches show."""

import operator
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import mlx.core as mx

from mlx_paged.attention.sdpa_hook import TaggedArray
from mlx_paged.drop_in.pool_layer import PoolLayer

mlx_depends, mlx_zeros_like = mx.depends, mx.zeros_like


class StoredArray(TaggedArray):
    """The keys or values of a cache, which are gathered when the array is evaluated."""

    role: str  # "keys" or "values"; "cleared": zeros of the shape of the keys
    layer: ref[PoolLayer]  # the layer that stores them
    # The cache's own tuple of that time, which identifies the cache and its content.
    starts: tuple[int, ...]
    dependencies: list[mx.array]  # arrays that were added as dependencies

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as MLX's own array."""
        return operator.itemgetter(0), ([mx.array(self)],)


def held_until_evaluated(array: mx.array, owner: object) -> mx.array:
    """The same array. `owner` exists until the array, or all that is computed from it, is evaluated
    or deleted: the graph refers to it."""
    hold = mx.custom_function(lambda x: x)
    hold.vjp(lambda primal, cotangent, output, owner=owner: cotangent)
    held: Any = hold(array)
    assert isinstance(held, mx.array)
    return held


@contextmanager
def stored_arrays_hook() -> Iterator[None]:
    """Let MLX's functions know these arrays, within this context. `mx.eval` of arrays that nobody
    keeps, as in ``mx.eval([c.state for c in cache])``, only writes the K/V. `mx.depends` and
    `mx.zeros_like` mark their results, so that they can be assigned."""
    before: Any = mx.eval

    def evaluate(*trees: Any) -> None:
        before(_written(trees))

    hooks: tuple[Any, ...] = evaluate, _depends, _zeros_like
    mx.eval, mx.depends, mx.zeros_like = hooks
    try:
        yield
    finally:
        mx.eval, mx.depends, mx.zeros_like = before, mlx_depends, mlx_zeros_like


def _references(items: Iterable[Any]) -> int:
    """The reference count of the first item in a loop over `items`."""
    return next(sys.getrefcount(item) for item in items)


_UNKEPT = _references([object()])


def _written(items: Iterable[Any]) -> list[Any]:
    """The items, with the pool's arrays in place of stored arrays that nobody else refers to."""
    found: list[Any] = []
    for item in items:
        if sys.getrefcount(item) > _UNKEPT:
            found.append(item)
        elif isinstance(item, StoredArray):
            found += _pool_arrays(item)
        elif type(item) in (list, tuple):
            found.append(_written(item))
        else:
            found.append(item)
    return found


def _pool_arrays(array: mx.array) -> list[mx.array]:
    """What to evaluate so that the writes to a stored array are done."""
    layer = array.layer() if isinstance(array, StoredArray) else None
    return [array] if layer is None else layer.kv.handles()


def _depends(inputs: Any, dependencies: Any, **kwargs: Any) -> Any:
    if not isinstance(inputs, StoredArray):
        return mlx_depends(inputs, dependencies, **kwargs)
    given = [dependencies] if isinstance(dependencies, mx.array) else dependencies
    arrays = [written for array in given for written in _pool_arrays(array)]
    result = mlx_depends(inputs, arrays, **kwargs)
    return StoredArray.of(result, **{**vars(inputs), "dependencies": arrays})


def _zeros_like(array: mx.array, /, **kwargs: Any) -> mx.array:
    zeros = mlx_zeros_like(array, **kwargs)
    if isinstance(array, StoredArray) and array.role == "keys":
        return StoredArray.of(zeros, **{**vars(array), "role": "cleared"})
    return zeros
