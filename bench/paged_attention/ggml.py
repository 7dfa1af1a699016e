"""ggml's flash attention on contiguous K/V, through the library that llama-cpp-python brings."""

import ctypes
import importlib.util
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from bench.machine import cores

TYPES = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 30}
"""Numbers of ``enum ggml_type``."""

OVERHEAD = 4 * 2**20  # bytes beyond those of the tensors: their headers, the graph, alignment


def is_installed() -> bool:
    """Whether a :class:`GgmlAttention` can be made."""
    return importlib.util.find_spec("llama_cpp") is not None


class _InitParams(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class _Plan(ctypes.Structure):
    """``struct ggml_cplan``."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )


class GgmlAttention:
    """Causal attention of one layer, a graph of one operation on all cores.

    Args:
        q: ``[B, H, L, D]``, the last L positions; computed in float32, as llama.cpp does.
        k, v: ``[B, H_kv, S, D]``, float32, float16 or bfloat16.
    """

    def __init__(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> None:
        base, self._cpu = _libraries()
        length, context = q.shape[2], k.shape[2]
        self._shape = (q.shape[0], length, q.shape[1], v.shape[3])
        num_bytes = 2 * 4 * q.size + k.nbytes + v.nbytes + 2 * length * context + OVERHEAD
        self._context = base.ggml_init(_InitParams(num_bytes, None, False))
        weakref.finalize(self, base.ggml_free, self._context)
        tensors = [self._tensor(base, x) for x in (q.astype(mx.float32), k, v)]
        tensors.append(self._tensor(base, _mask(length, context)) if length > 1 else None)
        self._out = base.ggml_flash_attn_ext(self._context, *tensors, scale, 0.0, 0.0)
        self._data = base.ggml_get_data(self._out)
        self._graph = base.ggml_new_graph(self._context)
        base.ggml_build_forward_expand(self._graph, self._out)
        self._plan = self._cpu.ggml_graph_plan(self._graph, cores(), None)
        self._work = np.empty(max(1, self._plan.work_size), np.uint8)
        self._plan.work_data = self._work.ctypes.data

    def __call__(self) -> None:
        """Compute, and wait for it."""
        status = self._cpu.ggml_graph_compute(self._graph, ctypes.byref(self._plan))
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute failed with status {status}")

    def output(self) -> np.ndarray:
        """Of the last call, ``[B, L, H, D]`` in float32."""
        floats = ctypes.cast(self._data, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, self._shape).copy()

    def _tensor(self, base: Any, array: mx.array) -> Any:
        sizes = _four(array.shape)[::-1]
        tensor = base.ggml_new_tensor_4d(self._context, TYPES[array.dtype], *sizes)
        values = np.array(array.view(mx.uint16) if array.itemsize == 2 else array)
        ctypes.memmove(base.ggml_get_data(tensor), values.ctypes.data, values.nbytes)
        return tensor


def _four(shape: Sequence[int]) -> tuple[int, ...]:
    return (*[1] * (4 - len(shape)), *shape)


def _mask(length: int, context: int) -> mx.array:
    """``[length, context]``: minus infinity where a key is later than the query."""
    positions = mx.arange(context - length, context)
    later = mx.arange(context)[None] > positions[:, None]
    return mx.where(later, -mx.inf, 0).astype(mx.float16)


def _libraries() -> tuple[Any, Any]:
    """ggml's core and its CPU backend, with the types of what is called here."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None
    directory = Path(spec.origin).parent / "lib"
    base, cpu = (
        ctypes.CDLL(str(next(directory.glob(f"libggml-{name}.*")))) for name in ("base", "cpu")
    )
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    for library, name, result, arguments in (
        (base, "ggml_init", pointer, [_InitParams]),
        (base, "ggml_free", None, [pointer]),
        (base, "ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int, *[size] * 4]),
        (base, "ggml_get_data", pointer, [pointer]),
        (base, "ggml_flash_attn_ext", pointer, [*[pointer] * 5, *[number] * 3]),
        (base, "ggml_new_graph", pointer, [pointer]),
        (base, "ggml_build_forward_expand", None, [pointer, pointer]),
        (cpu, "ggml_graph_plan", _Plan, [pointer, ctypes.c_int, pointer]),
        (cpu, "ggml_graph_compute", ctypes.c_int, [pointer, pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return base, cpu
