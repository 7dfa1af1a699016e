"""Ctrl-C before a command runs and after it has ended: the process exits without a traceback.

The package imports this module first. It imports only modules that Python has loaded before, or
that are built in: `signal` would import `enum`, and Ctrl-C in that import would show a traceback.
"""

import _signal as signal  # type: ignore[import-not-found]
import os
import sys

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell gives it."""

LINE = b"interrupted\n"


class Exit:
    """A handler of SIGINT that ends the process: it flushes nothing and calls no exit function."""

    def __init__(self, status: int, line: bytes) -> None:
        self.status = status
        self.line = line

    def __call__(self, number: int, frame: object) -> None:
        try:
            os.write(2, self.line)
        finally:  # the shell's `2>&-` closes it
            os._exit(self.status)


def exit_at_once(status: int, line: bytes = b"") -> None:
    """Let Ctrl-C end the process with `status`, after `line` on stderr. This changes nothing where
    SIGINT is ignored, as for a shell's background job, or has a handler of another program."""
    if _is_ours():
        signal.signal(signal.SIGINT, Exit(status, line))


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as Python does by default."""
    if _is_ours():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_ours() -> bool:
    handler = signal.getsignal(signal.SIGINT)
    return handler is signal.default_int_handler or isinstance(handler, Exit)


def guard_start() -> None:
    """Call `exit_at_once` if this process starts a command of this package, and no other program
    that imports it."""
    name = _command(sys.argv, sys.orig_argv)
    if name == "server":
        exit_at_once(0)
    elif name is not None:
        exit_at_once(INTERRUPTED, LINE)


def _command(argv: list[str], original: list[str]) -> str | None:
    """The name of the command that Python starts, such as "server"; "" if none is named, None for
    another program. While Python looks for the module of ``-m``, this is the first argument."""
    if argv[:1] == ["-m"]:
        package, *names = original[-len(argv)].removeprefix("-m").split(".")
    else:
        package, names = os.path.basename(argv[0]) if argv else "", []
    if package != "mlx_paged":
        return None
    return (names or argv[1:] or [""])[0]
