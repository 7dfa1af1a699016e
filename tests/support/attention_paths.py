"""Tables of attention paths for tests, and a process that goes by one."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from mlx_paged.attention.dispatch import VARIABLE, dispatcher
from mlx_paged.attention.path_table import Heads, PathTable, Timing
from mlx_paged.attention.pool_attention import calls

LLAMA = Heads("cpu", "float32", 2, 16, 16)
"""The heads of the tiny models."""


def table(rows: list[tuple[int, int, float, float]], heads: Heads = LLAMA) -> PathTable:
    """A table from rows of (length, context, paged_ms, gather_ms)."""
    return PathTable({heads: [Timing(*row) for row in rows]})


@contextmanager
def attending_by(wanted: str | PathTable, directory: Path | None = None) -> Iterator[None]:
    """The process goes by a value of the environment variable, or by a table in a file."""
    if isinstance(wanted, PathTable):
        assert directory is not None
        path = directory / "table.json"
        path.write_text(json.dumps(wanted.as_json()))
        wanted = str(path)
    with mock.patch.dict(os.environ, {VARIABLE: wanted}):
        dispatcher.cache_clear()
        calls.clear()
        try:
            yield
        finally:
            dispatcher.cache_clear()
