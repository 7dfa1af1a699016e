"""Time and memory that Python, the machine and MLX take behind an engine's back."""

import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import mlx.core as mx

_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Memory of the process now; where the system does not say, the most it ever had."""
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * _PAGE
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def start_afresh() -> None:
    """Let nothing of the run before weigh on the next one."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()


class GcTimer:
    """Seconds that Python's garbage collector took so far, while in its context."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._started = 0.0

    def __enter__(self) -> "GcTimer":
        gc.callbacks.append(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = self._clock()
        else:
            self.seconds += self._clock() - self._started
