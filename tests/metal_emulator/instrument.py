"""Calls of the runtime in LLVM's text of kernels, for what Mode.RACE watches and counts."""

import re

from . import toolchain

_PASSES = (
    # Neighbouring elements are one load, as where a GPU has vector loads.
    "-passes=function(load-store-vectorizer,tsan)",
    "-tsan-instrument-func-entry-exit=0",
    "-tsan-instrument-atomics=0",
    "-tsan-instrument-read-before-write",
)
OPERATIONS = ("exponential", "multiply_64")
"""As runtime/operations.h numbers them."""
_EXPONENTIAL = re.compile(r"\bcall [^@]*@(llvm\.)?exp(2|10)?f?[.(]")
_MULTIPLY_64 = re.compile(r"= mul (nuw |nsw )*(i64|<\d+ x i64>) ")


def instrument(code: str) -> str:
    """The optimised LLVM text `code` with calls for its memory accesses and its operations."""
    watched = toolchain.run("opt", "-S", *_PASSES, "-", source=code)
    lines = []
    for line in watched.splitlines():
        lines.append(line)
        if _EXPONENTIAL.search(line):
            lines.append(_call("exponential"))
        elif _MULTIPLY_64.search(line):
            lines.append(_call("multiply_64"))
    return "\n".join([*lines, "declare void @emulator_operation(i32)", ""])


def version() -> str:
    """What the result depends on, beside the code."""
    return " ".join([*_PASSES, _EXPONENTIAL.pattern, _MULTIPLY_64.pattern, *OPERATIONS])


def _call(operation: str) -> str:
    return f"  call void @emulator_operation(i32 {OPERATIONS.index(operation)})"
