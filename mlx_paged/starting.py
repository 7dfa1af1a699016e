"""Starts a command: before MLX makes its device, and so that Ctrl-C ends it without a traceback."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from mlx_paged import command_buffers, interrupts
from mlx_paged.interrupts import INTERRUPTED


def start(main: Callable[[], int], interrupted: int = INTERRUPTED) -> NoReturn:
    """Exit with the status that `main` returns, or with `interrupted` after Ctrl-C. Imports of a
    command are in `main`, because Ctrl-C may come during the imports. transformers does not advise
    to install PyTorch, as under mlx_lm. MLX's command buffers are as long as is best for this chip.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        interrupts.raise_again()
        open_standard_files()
        command_buffers.lengthen()
        status = main()
        sys.stdout.flush()
        interrupts.exit_at_once(status)
        sys.exit(status)
    except KeyboardInterrupt:
        exit_interrupted(interrupted)
    except BrokenPipeError:
        exit_unread()
        raise


def open_standard_files() -> None:
    """Open the null device as stdin, stdout and stderr where these are closed, as by the shell's
    ``>&-``. The next files that are opened would get their numbers: MLX reads no file whose number
    is 0, and what is printed would go to a file of the model."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def exit_unread() -> None:
    """Exit with 1 after a BrokenPipeError if the reader of stdout has closed it, as ``head`` does.
    Returns if another pipe broke."""
    from select import poll

    output, broken = sys.stdout.fileno(), poll()
    broken.register(output, 0)  # errors and hang-ups are always reported
    if broken.poll(0):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # Python flushes stdout when it ends
        sys.exit(1)


def exit_interrupted(status: int) -> NoReturn:
    """Exit with `status` after Ctrl-C; a status above 0 comes with a line on stderr."""
    # A Ctrl-C within `exec` of a text, as dataclasses use it, sets a flag of CPython that ends the
    # process by SIGINT even though the exception was caught. Each `exec` of a text resets the flag.
    exec("")
    interrupts.exit_at_once(status)
    if status:
        print("interrupted", file=sys.stderr)
    sys.exit(status)
