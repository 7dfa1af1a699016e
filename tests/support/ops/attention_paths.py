"""A process whose attention takes a path that the environment forces."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from mlx_paged.attention import paths
from mlx_paged.attention.forward import path_counts
from mlx_paged.attention.paths import VARIABLE


@contextmanager
def attending_by(wanted: str) -> Iterator[None]:
    """The environment variable has this value; paths are counted from 0."""
    with mock.patch.dict(os.environ, {VARIABLE: wanted}):
        paths._forced_path.cache_clear()
        path_counts.clear()
        try:
            yield
        finally:
            paths._forced_path.cache_clear()
