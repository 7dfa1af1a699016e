"""Which path attends: through block tables, or over blocks gathered once."""

import os
import warnings
from collections import Counter
from functools import cache

import mlx.core as mx

PATHS = "paged", "gather"
"""The paged op, through block tables; blocks gathered into one array, then MLX's own attention."""

VARIABLE = "MLX_PAGED_ATTENTION"
"""The environment variable that forces one of the paths."""

FEW_QUERIES = 8
"""On a GPU, chunks of up to so many tokens of a sequence take the paged op."""

ANY_NUMBER = 2**31

path_counts: Counter[str] = Counter()
"""How often each path was called since the process began."""


def max_paged_queries() -> int:
    """How many tokens of a sequence take the paged op; longer chunks are gathered.

    The default device and the environment decide. Callers ask once and keep the answer.
    """
    path = _forced_path()
    if path is None:
        return ANY_NUMBER if mx.default_device() == mx.cpu else FEW_QUERIES
    return ANY_NUMBER if path == "paged" else 0


@cache
def _forced_path() -> str | None:
    """What the environment asks for; None: nothing, or nothing that exists."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted in PATHS:
        return wanted
    if wanted:
        expected = " or ".join(PATHS)
        warnings.warn(f"{VARIABLE} is {wanted!r}: expected {expected}; ignored", stacklevel=3)
    return None
