"""Compiles translated kernels and the runtime to shared libraries."""

import functools
from pathlib import Path

from . import instrument, swizzles, toolchain
from .cache import cached, directory, provide
from .modes import Mode

_HERE = Path(__file__).parent
DEVICE_HEADERS = _HERE / "device"
_RUNTIME = _HERE / "runtime"

_KERNEL_FLAGS = (
    "-std=c++17",
    *("-mavx2", "-mfma", "-mf16c"),
    # No fused multiply-add, and half rounds after every operation: what MLX asks of Metal.
    "-ffp-contract=off",
    *("-Xclang", "-ffloat16-excess-precision=none"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fdeclspec"),
    # Findings need return addresses, and a stack overflow must not jump over the guard page.
    *("-fno-optimize-sibling-calls", "-fstack-clash-protection"),
    *("-Wno-everything", "-gline-tables-only"),
)
_LIBRARY_FLAGS = ("-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-Bsymbolic", *toolchain.linker())
_CODE_FLAGS = ("-x", "ir", "-O1", "-Xclang", "-disable-llvm-passes", "-Wno-everything")
"""To make code of LLVM's text as it is."""
_RUNTIME_FLAGS = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-gline-tables-only")


def build_kernels(code: str, mode: Mode) -> Path:
    """The shared library of translated `code`."""
    flags = (*_KERNEL_FLAGS, *_LIBRARY_FLAGS, *mode.flags)

    def compile_to(path: Path) -> None:
        arguments = (*flags, *_device_flags(mode), "-x", "c++", "-")
        if not mode.watches_accesses:
            toolchain.clang(*arguments, "-o", str(path), source=code)
            return
        optimised = toolchain.clang(*arguments, "-S", "-emit-llvm", "-o", "-", source=code)
        text = instrument.instrument(optimised)
        toolchain.clang(*_CODE_FLAGS, *_LIBRARY_FLAGS, "-", "-o", str(path), source=text)

    parts = [code, _device_text(), *flags, instrument.version(), toolchain.version()]
    return cached(".so", parts, compile_to)


def check_kernels(code: str) -> None:
    """Raise CompileError if translated `code` does not compile."""
    flags = (*_KERNEL_FLAGS, *Mode.FAST.flags, *_LIBRARY_FLAGS, "-fsyntax-only")
    arguments = ("-ferror-limit=0", *_device_flags(Mode.FAST), "-x", "c++", "-")
    toolchain.clang(*flags, *arguments, source=code)


@functools.cache
def build_runtime() -> Path:
    """The shared library of runtime/, compiled as one source because that is quicker."""
    sources = sorted(_RUNTIME.glob("*.cpp"))
    code = "".join(f'#include "{source.name}"\n' for source in sources)
    headers = (*_RUNTIME.glob("*.h"), DEVICE_HEADERS / "abi.h")
    text = [path.read_text() for path in (*sources, *sorted(headers))]
    flags = (*_RUNTIME_FLAGS, *_LIBRARY_FLAGS, f"-I{_RUNTIME}")

    def compile_to(path: Path) -> None:
        toolchain.clang(*flags, "-x", "c++", "-", "-o", str(path), source=code)

    return cached(".so", [*text, *flags, toolchain.version()], compile_to)


@functools.cache
def _device_text() -> str:
    """All that a kernel includes; part of what a compiled kernel depends on."""
    headers = [path.read_text() for path in sorted(DEVICE_HEADERS.glob("*.h"))]
    return "\0".join([*headers, *(swizzles.members(size) for size in (2, 3, 4))])


def generated_headers() -> Path:
    """The folder of the headers that are written by program."""
    generated = directory() / "generated"
    generated.mkdir(exist_ok=True)
    for size in (2, 3, 4):
        provide(generated / f"swizzles_{size}.h", swizzles.members(size))
    return generated


def _device_flags(mode: Mode) -> tuple[str, ...]:
    return "-include-pch", str(_compiled_headers(mode)), f"-I{generated_headers()}"


def _compiled_headers(mode: Mode) -> Path:
    """The device headers as clang reads them in a tenth of the time."""
    header, generated = DEVICE_HEADERS / "metal.h", generated_headers()
    flags = (*_KERNEL_FLAGS, "-fPIC", *mode.flags, f"-I{generated}")

    def compile_to(path: Path) -> None:
        # Without the times of the files: the cache goes by their text.
        arguments = ("-Xclang", "-fno-pch-timestamp", "-x", "c++-header", str(header))
        toolchain.clang(*flags, *arguments, "-o", str(path))

    return cached(".pch", [str(header), _device_text(), *flags, toolchain.version()], compile_to)
