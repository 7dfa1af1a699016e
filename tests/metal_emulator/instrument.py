"""Calls of the runtime in LLVM's text of kernels, for what Mode.RACE watches and counts."""

import re
from collections.abc import Iterator
from pathlib import Path

from . import accesses, toolchain
from .accesses import Access, Function, constants, functions, size

_PASSES = (
    # Neighbouring elements are one load, as where a GPU has vector loads.
    "-passes=function(load-store-vectorizer,tsan)",
    "-tsan-instrument-func-entry-exit=0",
    "-tsan-instrument-atomics=0",
    "-tsan-instrument-read-before-write",
)
OPERATIONS = ("exponential", "multiply_64")
"""As runtime/operations.h numbers them."""
_DECLARATIONS = (
    "declare void @emulator_operation(i32)",
    "declare void @emulator_read(ptr, i64)",
    "declare void @emulator_write(ptr, i64)",
)
_EXPONENTIAL = re.compile(r"\bcall [^@]*@(llvm\.)?exp(2|10)?f?[.(]")
_MULTIPLY_64 = re.compile(r"= mul (nuw |nsw )*(i64|<\d+ x i64>) ")

_SOURCE_LINE = re.compile(r", !dbg !\d+")
_KNOWN_SIZES = (16, 8, 4, 2, 1)
"""Bytes of an access that the sanitizer's pass knows. The pass is silent about all other sizes."""


def instrument(code: str) -> str:
    """The optimised LLVM text `code` with calls for its memory accesses and its operations.

    Raises:
        CompileError: The sanitizer's pass left out an access that another thread can meet.
    """
    watched = toolchain.run("opt", "-S", *_PASSES, "-", source=code)
    lines = []
    for line in _with_every_access(watched):
        lines.append(line)
        if _EXPONENTIAL.search(line):
            lines.append(_call("exponential"))
        elif _MULTIPLY_64.search(line):
            lines.append(_call("multiply_64"))
    return "\n".join([*lines, *_DECLARATIONS, ""])


def _with_every_access(code: str) -> Iterator[str]:
    """The lines of `code` with calls for the accesses of sizes that the sanitizer's pass does not
    know, such as vectors of three elements. Each becomes accesses of known sizes. Left out are
    constants, and variables of a thread whose address is never handed on."""
    unwritten = constants(code)
    for number, lines in enumerate(functions(code)):
        function = Function(lines)
        for place, line in enumerate(lines):
            function.read(line)
            access = Access.parse(line)
            if access and not function.is_watched(access):
                root = function.root(access)
                if not root.startswith("alloca ") and root not in unwritten:
                    yield from _calls(access, line, f"%access.{number}.{place}")
            yield line


def _calls(access: Access, line: str, name: str) -> Iterator[str]:
    """Calls for the `access` of a `line`, in the largest parts of known sizes."""
    bytes_ = size(access.type_name)
    if bytes_ in _KNOWN_SIZES:
        raise toolchain.CompileError(f"no call watches the access {line.strip()}")
    source = match[0] if (match := _SOURCE_LINE.search(line)) else ""
    begin = 0
    while begin < bytes_:
        part = next(known for known in _KNOWN_SIZES if known <= bytes_ - begin)
        yield f"  {name}.{begin} = getelementptr i8, ptr {access.address}, i64 {begin}{source}"
        yield f"  call void @emulator_{access.kind}(ptr {name}.{begin}, i64 {part}){source}"
        begin += part


def version() -> str:
    """What the result depends on, beside the code."""
    sources = (Path(__file__), Path(accesses.__file__))
    return " ".join([*_PASSES, *(source.read_text() for source in sources)])


def _call(operation: str) -> str:
    return f"  call void @emulator_operation(i32 {OPERATIONS.index(operation)})"
