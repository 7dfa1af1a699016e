"""Ticks as lines of JSON, written as they come. Knows no mlx."""

import json
import logging
import weakref
from io import FileIO
from os import PathLike

from mlx_paged.metrics.tick import Tick


class TickWriter:
    """Writes a line per tick, each of them whole, so that nothing is lost when the process ends.

    What the file held before is replaced with the first tick. A file that can no longer be written
    is given up with one warning: the engine goes on.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._failed = False
        open(path, "ab").close()

    def write(self, tick: Tick) -> None:
        if self._failed:
            return
        try:
            if self._file is None:
                self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            self._file.write(json.dumps(tick.as_dict()).encode() + b"\n")
        except OSError as error:
            self._failed = True
            logging.warning("no more ticks are written: %s", error)
