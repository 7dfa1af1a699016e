"""Arrays of MLX as NumPy's."""

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt


def as_numpy(array: mx.array) -> npt.NDArray[Any]:
    """An array of MLX as NumPy's, over the same memory where MLX lets NumPy see it.

    NumPy alone swallows an error of the evaluation: it asks for the array in another way, and MLX
    tells of an error only once. The result would have no meaning.

    Raises:
        RuntimeError: what MLX raises when it evaluates the array.
    """
    mx.eval(array)
    return np.asarray(array)
