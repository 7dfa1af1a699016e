"""What a launch needs and what it returns; mistakes of the host are ValueErrors."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from . import instrument, runtime_library
from .findings import Finding
from .language.translation import KernelSignature

THREADGROUP_LIMIT = 32 * 1024
"""Bytes of threadgroup memory on every Apple GPU that MLX supports."""
_MAX_THREADS = 1024
CPU_SECONDS = 120.0
"""After this long a kernel is taken to be in an endless loop."""

Buffer = np.ndarray | bytes | bytearray | memoryview | np.generic
Constant = bool | int | float

_INTEGER_RANGES = {
    "bool": (0, 1),
    **dict.fromkeys(("char", "int8_t"), (-(2**7), 2**7 - 1)),
    **dict.fromkeys(("uchar", "uint8_t"), (0, 2**8 - 1)),
    **dict.fromkeys(("short", "int16_t"), (-(2**15), 2**15 - 1)),
    **dict.fromkeys(("ushort", "uint16_t"), (0, 2**16 - 1)),
    **dict.fromkeys(("int", "int32_t"), (-(2**31), 2**31 - 1)),
    **dict.fromkeys(("uint", "uint32_t"), (0, 2**32 - 1)),
}


@dataclass(frozen=True, slots=True)
class UniqueBytes:
    """Bytes of one buffer, each taken once within the scope that the field names.

    per_simdgroup and per_threadgroup are sums over all simdgroups and all threadgroups.
    """

    per_simdgroup: int
    per_threadgroup: int
    per_launch: int


@dataclass(frozen=True, slots=True)
class Lines:
    """Instructions on one buffer, counted once per simdgroup, and the lines of 128 bytes that the
    lanes touch with each, added up. A buffer is taken to begin with a line."""

    load_instructions: int
    loaded: int
    store_instructions: int
    stored: int


@dataclass(frozen=True, slots=True)
class Operations:
    """How often one kind of operation was executed: by simdgroups, which execute it once for all
    lanes that are active, and by lanes."""

    by_simdgroups: int
    by_lanes: int


@dataclass(frozen=True, slots=True)
class LaunchStats:
    """What a launch did. The dictionaries go by buffer index unless they say otherwise, and are
    filled in Mode.RACE only."""

    threadgroups: int
    threads: int
    barriers: int
    """threadgroup_barrier, counted once per threadgroup."""
    simdgroup_barriers: int
    """simdgroup_barrier, counted once per simdgroup."""
    simd_ops: int
    """simd_sum, simd_shuffle, simdgroup_load, ...: counted once per simdgroup."""
    simd_reductions: int
    """Those of them that combine all lanes: simd_sum, simd_max, simd_all, ..."""
    matrix_multiplications: int
    """Those of them that multiply simdgroup matrices of 8x8."""
    matrix_accesses: int
    """Those of them that load or store such a matrix: every lane its own two elements."""
    threadgroup_bytes: int
    """The most that any threadgroup had, as the GPU would allocate it."""
    loaded_bytes: dict[int, int] = field(default_factory=dict)
    """What all lanes ask for: 32 lanes that load the same float are 128 bytes."""
    stored_bytes: dict[int, int] = field(default_factory=dict)
    """Likewise, for stores."""
    unique_loaded_bytes: dict[int, UniqueBytes] = field(default_factory=dict)
    """Loaded bytes without repetition: the traffic that caches of that scope cannot avoid."""
    lines: dict[int, Lines] = field(default_factory=dict)
    operations: dict[str, Operations] = field(default_factory=dict)
    """By their names in instrument.OPERATIONS."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a launch; the buffers hold what the kernel stored."""

    findings: list[Finding]
    stats: LaunchStats


def check_constants(kernel: KernelSignature, constants: Mapping[int, Constant]) -> None:
    """Raise ValueError unless every constant that the kernel may read is there and fits."""
    for constant in kernel.constants:
        what = f"[launch] {kernel.host_name}: function constant {constant.index} ({constant.name})"
        value = constants.get(constant.index)
        if value is None:
            raise ValueError(f"{what} is not given")
        if constant.type in ("float", "half"):
            continue
        low, high = _INTEGER_RANGES.get(constant.type, (-(2**63), 2**63 - 1))
        if int(value) != value or not low <= value <= high:
            raise ValueError(f"{what} is {value}, which is not a {constant.type}")


def make_request(
    kernel: KernelSignature,
    *,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    buffers: Mapping[int, Buffer],
    threadgroup_bytes: Mapping[int, int],
    grid_in_threads: bool,
    seed: int | None,
) -> tuple[runtime_library.Request, list[NDArray[np.uint8]]]:
    """The request, and the arrays that must live as long as it is used."""
    name = kernel.host_name
    _check_shape(name, grid, threadgroup)
    _check_indices(name, "buffer", set(buffers), _indices(kernel, "buffer"))
    memories = _indices(kernel, "threadgroup_memory")
    _check_indices(name, "threadgroup memory", set(threadgroup_bytes), memories)
    sizes = (ctypes.c_uint64 * runtime_library.MAX_THREADGROUP_BUFFERS)()
    for index in memories:
        size = threadgroup_bytes.get(index, 0)
        if size <= 0 or size % 16:
            raise ValueError(
                f"[launch] {name}: threadgroup memory {index} has {size} bytes: "
                "expected a positive multiple of 16"
            )
        sizes[index] = size
    bindings, arrays = _bind(name, buffers)
    request = runtime_library.Request(
        grid=grid,
        threadgroup=threadgroup,
        grid_in_threads=grid_in_threads,
        buffer_count=len(buffers),
        buffers=bindings,
        threadgroup_bytes=sizes,
        seed=seed or 0,
        has_seed=seed is not None,
        threadgroup_limit=THREADGROUP_LIMIT,
        cpu_seconds=CPU_SECONDS,
    )
    return request, arrays


def make_stats(
    counts: runtime_library.Counts, buffers: Mapping[int, Buffer], *, has_traffic: bool
) -> LaunchStats:
    """`counts` in Python's types; traffic only for the buffers that were bound."""
    traffic = {i: counts.traffic[i] for i in sorted(buffers)} if has_traffic else {}
    return LaunchStats(
        threadgroups=counts.threadgroups,
        threads=counts.threads,
        barriers=counts.barriers,
        simdgroup_barriers=counts.simdgroup_barriers,
        simd_ops=counts.simd_operations,
        simd_reductions=counts.simd_reductions,
        matrix_multiplications=counts.matrix_multiplications,
        matrix_accesses=counts.matrix_accesses,
        threadgroup_bytes=counts.threadgroup_bytes,
        loaded_bytes={i: t.loaded for i, t in traffic.items()},
        stored_bytes={i: t.stored for i, t in traffic.items()},
        unique_loaded_bytes={
            i: UniqueBytes(
                t.distinct_per_simdgroup, t.distinct_per_threadgroup, t.distinct_per_launch
            )
            for i, t in traffic.items()
        },
        lines={i: _lines(counts.lines[i]) for i in traffic},
        operations=_operations(counts) if has_traffic else {},
    )


def _operations(counts: runtime_library.Counts) -> dict[str, Operations]:
    found = zip(instrument.OPERATIONS, counts.operations, strict=True)
    return {name: Operations(each.by_simdgroups, each.by_lanes) for name, each in found}


def _lines(counts: runtime_library.LineCounts) -> Lines:
    return Lines(
        counts.load_instructions,
        counts.loaded_lines,
        counts.store_instructions,
        counts.stored_lines,
    )


def _check_shape(name: str, grid: tuple[int, ...], threadgroup: tuple[int, ...]) -> None:
    for what, shape in (("grid", grid), ("threadgroup", threadgroup)):
        if len(shape) != 3 or any(not 1 <= n < 2**32 for n in shape):
            raise ValueError(
                f"[launch] {name}: {what} is {shape}: expected three positive integers"
            )
    threads = int(np.prod(threadgroup))
    if threads > _MAX_THREADS:
        raise ValueError(f"[launch] {name}: {threads} threads per threadgroup, the limit is 1024")


def _indices(kernel: KernelSignature, kind: str) -> set[int]:
    return {int(p.index) for p in kernel.parameters if p.kind == kind}


def _check_indices(name: str, what: str, given: set[int], known: set[int]) -> None:
    unknown = sorted(given - known)
    if unknown:
        raise ValueError(f"[launch] {name} has no {what} {unknown[0]}: it has {sorted(known)}")
    if known and max(known) >= runtime_library.MAX_BUFFERS:
        raise ValueError(f"[launch] {name} has {what} {max(known)}: the highest index is 30")


def _bind(
    name: str, buffers: Mapping[int, Buffer]
) -> tuple[ctypes.Array[runtime_library.BufferBinding], list[NDArray[np.uint8]]]:
    bindings = (runtime_library.BufferBinding * max(1, len(buffers)))()
    arrays: list[NDArray[np.uint8]] = []
    ranges: dict[int, tuple[int, int]] = {}  # of the addresses of each buffer
    for binding, (index, buffer) in zip(bindings, sorted(buffers.items()), strict=False):
        array = _as_bytes(name, index, buffer)
        arrays.append(array)
        begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
        alias = -1
        for other, (other_begin, other_end) in ranges.items():
            if other_begin <= begin < end <= other_end:
                alias = other
            elif begin < other_end and other_begin < end:
                raise ValueError(f"[launch] {name}: buffers {other} and {index} overlap in part")
        if alias < 0:
            ranges[index] = (begin, end)
        binding.index, binding.alias_of = index, alias
        binding.data, binding.size = begin, array.nbytes
        binding.is_writable = array.flags.writeable
    return bindings, arrays


def _as_bytes(name: str, index: int, buffer: Buffer) -> NDArray[np.uint8]:
    """The memory of `buffer` itself, as bytes."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError(f"[launch] {name}: buffer {index} is not contiguous")
        return buffer.reshape(-1).view(np.uint8)
    try:
        return np.frombuffer(buffer, dtype=np.uint8)
    except TypeError:
        raise ValueError(
            f"[launch] {name}: buffer {index} is a {type(buffer).__name__}: "
            "expected a numpy array or bytes"
        ) from None
