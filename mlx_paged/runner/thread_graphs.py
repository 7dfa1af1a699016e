"""Frees what ``mx.compile`` has traced in a thread when the thread ends."""

import threading

from mlx_paged import ops


class _ThreadEnd:
    """Frees the graphs of a thread when it ends, with Python's lock. MLX frees them later, without
    the lock; if the process exits meanwhile, it aborts."""

    def __del__(self) -> None:
        ops.clear_compiled()


of_thread = threading.local()
"""Of a thread that :func:`free_graphs_with_thread` has seen the attribute `end`."""


def free_graphs_with_thread() -> None:
    """Free what ``mx.compile`` traces in this thread when the thread ends."""
    if not hasattr(of_thread, "end"):
        is_main = threading.current_thread() is threading.main_thread()
        of_thread.end = None if is_main else _ThreadEnd()
