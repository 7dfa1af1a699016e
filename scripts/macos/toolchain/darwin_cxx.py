#!/usr/bin/env python3
"""A macOS arm64 `c++` for Linux, called the way CMake calls one: zig compiles, LLVM's lld links.

The environment's MACOSX_DEPLOYMENT_TARGET says which macOS the output must still run on.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

HEADER_STUBS = Path(__file__).with_name("include")

SDK_OPTIONS = {"-arch", "-isysroot", "-F", "-framework"}
"""Take a value, and choose among what Apple's SDK holds: there is none here."""

DARWIN_DIALECT = [
    "-D_DARWIN_C_SOURCE",
    # zig brings its own libc++ and drops the marks of what Apple's libc++.1.dylib lacks or exports.
    "-U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS",
    "-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1",
    "-U_LIBCPP_DISABLE_VISIBILITY_ANNOTATIONS",
    "-U_LIBCXXABI_DISABLE_VISIBILITY_ANNOTATIONS",
    # Apple's compiler does not call the sized operator delete either.
    "-fno-sized-deallocation",
    *("-isystem", str(HEADER_STUBS)),
]


def without_sdk_options(args: Sequence[str]) -> list[str]:
    kept = []
    rest = iter(args)
    for arg in rest:
        if arg in SDK_OPTIONS:
            next(rest)
        elif not arg.startswith(("-F/", "-mmacos")):
            kept.append(arg)
    return kept


def compile_command(args: Sequence[str], min_macos: str) -> list[str]:
    zig = [sys.executable, "-m", "ziglang"]
    return [*zig, "c++", "-target", f"aarch64-macos.{min_macos}", *args, *DARWIN_DIALECT]


def link_command(args: Sequence[str], min_macos: str) -> list[str]:
    """The linker takes what a compiler driver would hand to it; the rest concerns compiling."""
    command = ["ld64.lld-19", "-arch", "arm64", "-platform_version", "macos", min_macos, min_macos]
    rest = iter(args)
    for arg in rest:
        if arg.startswith("-Wl,"):
            command += arg.split(",")[1:]
        elif arg == "-o":
            command += [arg, next(rest)]
        elif arg == "-bundle" or arg.startswith(("-l", "-L")) or not arg.startswith("-"):
            command.append(arg)
    return command


def main() -> None:
    args = without_sdk_options(sys.argv[1:])
    min_macos = os.environ["MACOSX_DEPLOYMENT_TARGET"]
    is_compilation = not {"-c", "-E", "--version", "-v"}.isdisjoint(args)
    command = (compile_command if is_compilation else link_command)(args, min_macos)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
