"""How many operations MLX puts into a command buffer of a Mac's GPU, and how many elements."""

import os
import re
import subprocess
import sys

OPERATIONS, ELEMENTS = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
"""Variables that MLX reads when it makes its device."""

MANY = 1000
"""Operations of a command buffer: more than a step of a decode has, so that elements end the
others."""

MOST_ELEMENTS = 50
"""Millions of elements (2^20) of MLX's command buffers, where the variable is not set."""

SYSCTL = "/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"


def lengthen() -> None:
    """Let command buffers have `MANY` operations on an M1 to M4, unless the environment says how
    many. An M5 gains nothing. Call this before MLX makes its device."""
    if OPERATIONS not in os.environ and re.match(r"Apple M[1-4]\b", chip_name()):
        os.environ[OPERATIONS] = str(MANY)


def chip_name() -> str:
    """The chip of this Mac, such as "Apple M4 Max"; "" if this is no Mac, or nobody tells."""
    if sys.platform != "darwin":
        return ""
    try:
        done = subprocess.run(SYSCTL, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def most_elements() -> int:
    """How many elements the operations of a command buffer bind at most, without its last one."""
    given = os.environ.get(ELEMENTS, "")
    return (int(given) if given.isdecimal() else MOST_ELEMENTS) << 20
