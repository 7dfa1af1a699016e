"""Which path attends: by a table of measured times, never by the clock.

The table is this machine's own, if ``python -m bench.paged_attention --write-table`` wrote one to
the user's cache directory, or else the one that ships with the package.
"""

import json
import os
import sys
import warnings
from contextlib import suppress
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mlx_paged.attention.path_table import AttentionPath, Heads, PathTable

VARIABLE = "MLX_PAGED_ATTENTION"
"""In the environment: "paged" or "gather" forces a path, "default" takes the shipped table, and
anything else is the file of a table."""

FEW_QUERIES = 8
"""Where nothing was measured, up to so many tokens of a sequence take the paged op."""


class Dispatcher:
    """Answers from a table; the same table gives the same answers.

    Args:
        table: what was measured.
        forced: the answer to everything, if any.
    """

    def __init__(self, table: PathTable, forced: AttentionPath | None = None) -> None:
        self.table = table
        self.forced = forced
        self.path = lru_cache(maxsize=1024)(self._path)  # layers ask the same one after the other
        """``path(heads, length, context)``: for `length` query tokens at the end of `context`
        tokens of each sequence."""

    def _path(self, heads: Heads, length: int, context: int) -> AttentionPath:
        if self.forced is not None:
            return self.forced
        measured = self.table.faster(heads, length, context)
        if measured is not None:
            return measured
        return AttentionPath.PAGED if length <= FEW_QUERIES else AttentionPath.GATHER


@cache
def dispatcher() -> Dispatcher:
    """The process's own, made from the environment and the table's file when first asked for."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted in list(AttentionPath):
        return Dispatcher(PathTable({}), AttentionPath(wanted))
    if wanted == "default":
        return Dispatcher(shipped_table())
    path = Path(wanted) if wanted else table_path()
    if not wanted and not path.exists():
        return Dispatcher(shipped_table())
    try:
        return Dispatcher(read_table(path))
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the table of attention paths {path} is not used: {error}; the shipped one is."
            " python -m bench.paged_attention --write-table writes a new one",
            stacklevel=2,
        )
        return Dispatcher(shipped_table())


def table_path() -> Path:
    """Where this user's table is, or would be."""
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "mlx_paged" / "attention_paths.json"


def shipped_table() -> PathTable:
    """The package's table; its `about` names the machine that was measured."""
    resource = files("mlx_paged") / "attention_paths.json"
    return PathTable.from_json(json.loads(resource.read_text(encoding="utf-8")))


def read_table(path: Path) -> PathTable:
    """The table in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no table.
    """
    return PathTable.from_json(json.loads(path.read_text(encoding="utf-8")))


def write_table(path: Path, table: PathTable) -> None:
    """Put a table into a file, whole or not at all; kinds that only the old one has are kept."""
    with suppress(OSError, ValueError):  # there was none
        table = read_table(path).updated(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(_text(table.as_json()), encoding="utf-8")
    unfinished.replace(path)


def _text(content: dict[str, Any]) -> str:
    """JSON with a line for each kind of heads."""
    kinds = ",\n".join(json.dumps(kind) for kind in content.pop("kinds"))
    return f'{json.dumps(content)[:-1]}, "kinds": [\n{kinds}\n]}}\n'
