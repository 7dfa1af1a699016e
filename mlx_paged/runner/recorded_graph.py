"""A graph that MLX traced once, and that is built again without Python's code."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_paged import ops

Tree = Any
"""Nested dicts, lists and tuples of arrays; other values may lie among the arrays."""


class RecordedGraph:
    """The results of a function for other arrays of the same shapes and dtypes.

    ``mx.compile`` made the function. It is called once, with arrays without values. The graph
    between these and the results is recorded, and nothing of it is evaluated.

    Args:
        function: of `inputs` and `constants`; returns a tree.
        inputs: a tuple of trees.

    Raises:
        ValueError: the function has kept one of the inputs from an earlier call.
    """

    def __init__(
        self, function: Callable[..., Tree], inputs: tuple[Tree, ...], *constants: Any
    ) -> None:
        own = ops.arrays_in(inputs)[0]
        given = ops.without_values(own)
        results = function(*ops.with_arrays(inputs, given), *constants)
        found = ops.arrays_in(results)[0]
        self._tape = ops.Tape(given, found, own)
        self._results = ops.with_arrays(results, ops.without_values(found))

    def __call__(self, arrays: list[mx.array]) -> Tree | None:
        """The function's results for the arrays of other inputs, in the order of
        ``ops.arrays_in``. None: an array has another shape or dtype."""
        found = self._tape(arrays)
        return None if found is None else ops.with_arrays(self._results, found)
