"""How a bench counts seconds."""

import time
from collections.abc import Callable
from enum import StrEnum


class Clock(StrEnum):
    """How seconds are counted."""

    WALL = "wall"
    PROCESSOR = "processor"

    def seconds(self, run: Callable[[], object], num_threads: int) -> float:
        """The wall time of `run`, or the processor time of all threads divided by `num_threads`.

        Processor time tells what an idle machine would need, if the threads share the work evenly.
        It is too short for work on one thread, such as most of MLX's on a CPU.
        """
        read = time.perf_counter if self is Clock.WALL else time.process_time
        started = read()
        run()
        elapsed = read() - started
        return elapsed if self is Clock.WALL else elapsed / num_threads
