"""Ticks as lines of JSON, written as they come. Knows no mlx."""

import json
import logging
import weakref
from os import PathLike
from typing import TextIO

from mlx_paged.tick import Tick


class TickWriter:
    """Writes a line per tick, each of them whole, so that nothing is lost when the process ends.

    What the file held before is replaced with the first tick. A file that can no longer be written
    is given up with one warning: the engine goes on.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._failed = False
        open(path, "a", encoding="utf-8").close()

    def write(self, tick: Tick) -> None:
        if self._failed:
            return
        try:
            if self._file is None:
                self._file = open(self._path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            self._file.write(json.dumps(tick.as_dict()) + "\n")
        except OSError as error:
            self._failed = True
            logging.warning("no more ticks are written: %s", error)
