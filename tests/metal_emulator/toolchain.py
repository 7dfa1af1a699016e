"""The compiler that the emulator needs, and how to call it."""

import functools
import os
import platform
import shutil
import subprocess

VERSION = 19
PACKAGES = f"clang-{VERSION} libclang-rt-{VERSION}-dev llvm-{VERSION}"


class ToolchainMissing(Exception):
    """The emulator cannot run on this machine; the message says what to install."""


class CompileError(Exception):
    """Clang refuses the source; the message holds its errors by file and line."""


@functools.cache
def missing() -> str:
    """Why the emulator cannot run here, or "" if it can."""
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64":
        return f"the Metal emulator runs on Linux x86_64 only, this is {machine}"
    programs = [f"{program}-{VERSION}" for program in ("clang++", "opt", "llvm-symbolizer")]
    absent = [program for program in programs if shutil.which(program) is None]
    if not absent:
        return ""
    return (
        f"the Metal emulator needs {' and '.join(absent)}: "
        f"apt-get install --no-install-recommends {PACKAGES}"
    )


def linker() -> tuple[str, ...]:
    """Arguments for the quickest linker here. LLVM's is there where the macOS wheel is built."""
    return ("-fuse-ld=lld",) if shutil.which(f"ld.lld-{VERSION}") else ()


def is_required() -> bool:
    """Whether a machine without the toolchain is an error (CI) rather than a reason to skip."""
    return os.environ.get("METAL_EMULATOR_REQUIRED") == "1"


def clang(*arguments: str, source: str | None = None) -> str:
    """Run clang++, as `run` does."""
    return run("clang++", "-fno-color-diagnostics", *arguments, source=source)


def output_of_clang(*arguments: str, source: str) -> tuple[str, str]:
    """What clang++ prints of a source, also of one that it refuses, and its errors."""
    result = _completed("clang++", "-fno-color-diagnostics", *arguments, source=source)
    return result.stdout, result.stderr


def run(program: str, *arguments: str, source: str | None = None) -> str:
    """Run a program, with `source` as its standard input if given. Returns its standard output."""
    result = _completed(program, *arguments, source=source)
    if result.returncode != 0:
        raise CompileError(result.stderr.strip())
    return result.stdout


def _completed(
    program: str, *arguments: str, source: str | None
) -> "subprocess.CompletedProcess[str]":
    if missing():
        raise ToolchainMissing(missing())
    command = [f"{program}-{VERSION}", *arguments]
    return subprocess.run(command, input=source, capture_output=True, text=True)


@functools.cache
def version() -> str:
    """The compiler's own version line."""
    return clang("--version").splitlines()[0]


def symbolizer() -> str:
    """The program that turns code addresses into source lines."""
    if missing():
        raise ToolchainMissing(missing())
    return f"llvm-symbolizer-{VERSION}"
