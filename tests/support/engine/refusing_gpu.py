"""A GPU whose compiler refuses some kernels, without one: the package's ops choose as on a GPU, and
what they choose to launch runs in the emulator."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged import _ext, ops
from mlx_paged.attention import paths
from mlx_paged.attention.forward import path_counts
from mlx_paged.ops import dispatch, paged
from mlx_paged.ops.formats import dims_of
from tests.support.engine.emulated_gpu import LONG_CHUNK
from tests.support.ops.metal_runner import MetalRunner

MESSAGE = "error: planted"


class RefusingGPU:
    """Takes the place of ``mlx_paged._ext`` in the ops. A call with a refused kernel gives NaN and
    changes nothing.

    Args:
        refused: how the names of refused kernels begin.

    Attributes:
        metal: as of ``_ext``; `runner` has a trace of what was launched.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *refused: str) -> None:
        self.runner = MetalRunner()
        self._refused = refused
        submodule = {name: getattr(_ext.metal, name) for name in dir(_ext.metal)}
        submodule |= {"has_metal": lambda: True, "refusal": self._refusal}
        self.metal = SimpleNamespace(**submodule)
        for module in (paged, dispatch):
            monkeypatch.setattr(module, "_ext", self)
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        monkeypatch.setattr(ops, "pool_zeros", lambda shape, dtype, **_: mx.zeros(shape, dtype))
        monkeypatch.setattr(ops, "append_kv", lambda *_: None)  # a write and a gather are two calls
        monkeypatch.setattr(paths, "LONG_CHUNK", LONG_CHUNK)
        monkeypatch.setattr(paths, "HEADS_OF_MLX", range(65))
        path_counts.clear()
        dispatch.forget()

    def __getattr__(self, name: str) -> Any:
        return getattr(_ext, name)

    def paged_attention(
        self, q: mx.array, k_cache: mx.array, v_cache: mx.array, *arrays: mx.array, **options: Any
    ) -> Any:
        for name in ("check_tables", "stream"):
            options.pop(name, None)
        nothing = mx.full((*q.shape[:-1], dims_of(v_cache)), mx.nan, q.dtype)
        try:
            call = _ext.metal.plan_attention(q, k_cache, v_cache, *arrays, **options)
        except RuntimeError:  # no kernel computes such a batch: nobody launches it
            return nothing
        return self.runner.run(call)[0].astype(q.dtype) if self._is_taken(call) else nothing

    def write_kv(self, *arrays: mx.array, stream: Any = None, **scales: mx.array) -> list[mx.array]:
        caches = [*arrays[2:4], *scales.values()]
        nothing = [mx.full(cache.shape, mx.nan).astype(cache.dtype) for cache in caches]
        try:
            call = _ext.metal.plan_write_kv(*arrays, **scales)
        except RuntimeError:  # rows of no whole vectors: nobody launches it
            return nothing
        if not self._is_taken(call):
            return nothing
        self.runner.run(call)
        return caches

    def copy_blocks(self, *arrays: mx.array, stream: Any = None) -> tuple[mx.array, mx.array]:
        k_cache, v_cache, _ = arrays
        call = _ext.metal.plan_copy_blocks(*arrays)
        if not self._is_taken(call):
            return mx.full(k_cache.shape, mx.nan), mx.full(v_cache.shape, mx.nan)
        self.runner.run(call)
        return k_cache, v_cache

    def _refusal(self, launch: dict[str, Any]) -> str:
        return MESSAGE if launch["kernel"].startswith(self._refused) else ""

    def _is_taken(self, call: dict[str, Any]) -> bool:
        is_off = dispatch.are_switched_off()
        return not is_off and not any(map(self._refusal, call["launches"]))
