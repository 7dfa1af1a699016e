"""The runtime's C interface. The structures have the fields of runtime/api.cpp and device/abi.h."""

import ctypes
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .build import build_runtime
from .cache import directory
from .instrument import OPERATIONS

MAX_BUFFERS = 31
MAX_THREADGROUP_BUFFERS = 31

LOCK = threading.RLock()
"""Held while a library is loaded or a kernel runs: the runtime knows one launch."""


class BufferBinding(ctypes.Structure):
    _fields_ = (
        ("index", ctypes.c_int32),
        ("alias_of", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("is_writable", ctypes.c_int32),
    )


class Request(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("grid_in_threads", ctypes.c_int32),
        ("buffer_count", ctypes.c_int32),
        ("buffers", ctypes.POINTER(BufferBinding)),
        ("threadgroup_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("seed", ctypes.c_uint64),
        ("has_seed", ctypes.c_int32),
        ("watch_accesses", ctypes.c_int32),
        ("threadgroup_limit", ctypes.c_uint32),
        ("cpu_seconds", ctypes.c_double),
    )


class TrafficCounts(ctypes.Structure):
    _fields_ = (
        ("loaded", ctypes.c_uint64),
        ("stored", ctypes.c_uint64),
        ("distinct_per_simdgroup", ctypes.c_uint64),
        ("distinct_per_threadgroup", ctypes.c_uint64),
        ("distinct_per_launch", ctypes.c_uint64),
    )


class LineCounts(ctypes.Structure):
    _fields_ = (
        ("load_instructions", ctypes.c_uint64),
        ("loaded_lines", ctypes.c_uint64),
        ("store_instructions", ctypes.c_uint64),
        ("stored_lines", ctypes.c_uint64),
    )


class OperationCounts(ctypes.Structure):
    _fields_ = (("by_simdgroups", ctypes.c_uint64), ("by_lanes", ctypes.c_uint64))


class Counts(ctypes.Structure):
    _fields_ = (
        ("threadgroups", ctypes.c_uint64),
        ("threads", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("simdgroup_barriers", ctypes.c_uint64),
        ("simd_operations", ctypes.c_uint64),
        ("simd_reductions", ctypes.c_uint64),
        ("matrix_multiplications", ctypes.c_uint64),
        ("matrix_accesses", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("traffic", TrafficCounts * MAX_BUFFERS),
        ("lines", LineCounts * MAX_BUFFERS),
        ("operations", OperationCounts * len(OPERATIONS)),
    )


class _FindingView(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char_p),
        ("detail", ctypes.c_char_p),
        ("code_offset", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
    )


class _Kernel(ctypes.Structure):
    pass


_Kernel._fields_ = (
    ("name", ctypes.c_char_p),
    ("run", ctypes.c_void_p),
    ("parameters", ctypes.c_void_p),
    ("parameter_count", ctypes.c_int),
    ("next", ctypes.POINTER(_Kernel)),
)


@dataclass(frozen=True, slots=True)
class RawFinding:
    """A finding before its address is looked up; `code_offset` 0 means no address."""

    kind: str
    detail: str
    code_offset: int
    count: int


def launch(request: Request) -> tuple[Counts, list[RawFinding]]:
    """Run one kernel to its end or to its first fault."""
    with LOCK:
        runtime = _runtime()
        error = runtime.emulator_launch(ctypes.byref(request))
        if error:
            raise RuntimeError(f"the emulator could not launch: {error.decode()}")
        counts = Counts()
        runtime.emulator_counts(ctypes.byref(counts))
        findings = list(_findings(runtime))
        runtime.emulator_forget()
        return counts, findings


class LoadedLibrary:
    """Compiled kernels in memory, with one set of function constants."""

    def __init__(self, path: Path, constants: Mapping[int, bool | int | float]) -> None:
        with LOCK:
            runtime = _runtime()
            runtime.emulator_clear_constants()
            for index, value in constants.items():
                runtime.emulator_set_constant(index, int(value), float(value))
            # The constants are read while the library loads, and the same file would not be loaded
            # twice: each set of constants needs a copy, which may go once it is in memory.
            with tempfile.TemporaryDirectory(dir=directory()) as scratch:
                copy = shutil.copy(path, scratch)
                self._library = ctypes.CDLL(copy, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self._library.emulator_kernels.restype = ctypes.POINTER(_Kernel)
        self.kernels: dict[str, int] = {}
        """Addresses of the kernels' records, by host name."""
        kernel = self._library.emulator_kernels()
        while kernel:
            address = ctypes.addressof(kernel.contents)
            self.kernels[kernel.contents.name.decode()] = address
            kernel = kernel.contents.next


def _findings(runtime: Any) -> Iterator[RawFinding]:
    for index in range(runtime.emulator_finding_count()):
        view = _FindingView()
        runtime.emulator_finding(index, ctypes.byref(view))
        yield RawFinding(view.kind.decode(), view.detail.decode(), view.code_offset, view.count)


@functools.cache
def _runtime() -> Any:
    # Global, because the kernels' libraries look their services up in it.
    runtime = ctypes.CDLL(str(build_runtime()), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    runtime.emulator_launch.restype = ctypes.c_char_p
    runtime.emulator_set_constant.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_double)
    return runtime
