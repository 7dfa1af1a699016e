"""Records graphs that MLX has traced, so that they are built again without Python's code."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_paged import ops

Tree = Any
"""Nested dicts, lists and tuples of arrays; other values may lie among the arrays."""


def groups_nodes() -> bool:
    """Whether a CPU computes the graphs that are recorded now, so that groups save time."""
    return mx.default_device() == mx.Device(mx.cpu)


def recorded_graph(
    function: Callable[..., Tree], inputs: tuple[Tree, ...], *constants: Any, groups: bool = False
) -> ops.Tape:
    """The results of a function for other arrays of the same shapes and dtypes.

    ``mx.compile`` made the function. It is called once, with arrays without values. The graph
    between these and the results is recorded, and nothing of it is evaluated.

    Args:
        function: of `inputs` and `constants`; returns a tree.
        inputs: a tuple of trees.
        groups: whether nodes in a row that a CPU computes are one node. Whoever evaluates any
            result must evaluate the first one, too.

    Returns:
        A function of the arrays of other inputs, in the order of ``ops.arrays_in``. It returns a
        tree like that of `function`, or None if an array has another shape or dtype.

    Raises:
        ValueError: the function has kept one of the inputs from an earlier call.
    """
    own = ops.arrays_in(inputs)[0]
    given = ops.without_values(own)
    results = function(*ops.with_arrays(inputs, given), *constants)
    return ops.Tape(given, results, own, groups)
