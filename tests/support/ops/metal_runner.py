"""Executes the ops' Metal launch plans in the emulator, on the memory of MLX arrays.

The plans are those that ``eval_gpu`` encodes; the arrays are bound as it binds them.
"""

import json
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext, ops
from mlx_paged.ops.fallback import single_tokens
from mlx_paged.ops.formats import dims_of, format_of
from tests.metal_emulator import LaunchStats, Library, Mode, require_emulator

METAL = Path(__file__).resolve().parents[3] / "metal"
POISON = 0xFF
SCALES = "k_scales", "v_scales"
MUTATION = "MLX_PAGED_METAL_MUTATION"


@dataclass
class Trace:
    """What ran, in order."""

    kernels: list[str] = field(default_factory=list)
    pipelines: list[str] = field(default_factory=list)
    stats: list[LaunchStats] = field(default_factory=list)


def _mutated(source: str) -> str:
    """The source, or what scripts/metal/mutate.py wants: in one file of metal/, if it is part of
    the source, the n-th occurrence of a text replaced."""
    if MUTATION not in os.environ:
        return source
    file, old, new, nth = json.loads(os.environ[MUTATION])
    text = (METAL / file).read_text()
    parts = text.split(old)
    assert len(parts) > nth + 1, "the mutation is not in the file"
    return source.replace(text, old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :]))


@lru_cache(maxsize=256)
def _library(source: str, name: str, mode: Mode) -> Library:
    return Library.from_source(source, f"{name}.metal", mode)


def memory(array: mx.array) -> np.ndarray:
    """The memory behind an evaluated array as one flat, writable array; bfloat16 as uint16."""
    mx.eval(array)
    viewed = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(viewed)
    values = np.asarray(viewed)
    if values.size == 0:
        return np.zeros(0, values.dtype)
    extent = sum(n * s for n, s in zip((n - 1 for n in values.shape), values.strides, strict=True))
    count = extent // values.itemsize + 1
    return np.lib.stride_tricks.as_strided(values, (count,), (values.itemsize,))


def _up_to_common_ends(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Arrays that overlap, as columns of one do, made to end where the last of them ends: what is
    bound on a GPU has no end."""
    begins = [array.ctypes.data for array in arrays]
    ends = [begin + array.nbytes for begin, array in zip(begins, arrays, strict=True)]
    extended = []
    for array, begin, end in zip(arrays, begins, ends, strict=True):
        last = max(
            (e for b, e in zip(begins, ends, strict=True) if b < end and begin < e), default=end
        )
        count = (last - begin) // array.itemsize
        extended.append(np.lib.stride_tricks.as_strided(array, (count,), (array.itemsize,)))
    return extended


def _of_layer(options: dict[str, Any], layer: int) -> dict[str, Any]:
    """The options of a plan: the scales of one layer, where an op takes those of all."""
    return options | {name: options[name][layer] for name in SCALES if name in options}


class MetalRunner:
    """The three ops, each through its launch plans."""

    def __init__(self, mode: Mode = Mode.FAST, seed: int | None = None) -> None:
        require_emulator()
        self.mode = mode
        self.seed = seed
        self.trace = Trace()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the package's ops run here, on pools as a GPU makes them."""
        monkeypatch.setattr(ops, "pool_zeros", lambda shape, dtype, **_: mx.zeros(shape, dtype))
        taken = "paged_attention", "paged_attention_varlen", "attend", "write_kv", "copy_blocks"
        for op in taken:
            monkeypatch.setattr(ops, op, getattr(self, op))
        monkeypatch.setattr(ops, "append_kv", lambda *_: None)  # a write and a gather are two calls

    def attend(
        self,
        q,
        kv,
        block_tables,
        context_lens,
        is_known,
        cu_seqlens=None,
        num_decodes=0,
        **options: Any,
    ) -> Any:
        """As ``mlx_paged.ops.attend``."""
        options |= {name: [array] for name, array in kv.options.items()}
        arrays = q, [kv.keys], [kv.values], block_tables, context_lens
        if cu_seqlens is None:
            return self.paged_attention(*arrays, **options)
        return self.paged_attention_varlen(*arrays, cu_seqlens, num_decodes=num_decodes, **options)

    def paged_attention(
        self, q, k_cache, v_cache, block_tables, context_lens, layer_idx=0, **options: Any
    ) -> Any:
        """As ``mlx_paged.paged_attention`` with lists of layers."""
        options.pop("check_tables", None)
        options.setdefault("scale", q.shape[-1] ** -0.5)
        options = _of_layer(options, layer_idx)
        call = _ext.metal.plan_attention(
            q, k_cache[layer_idx], v_cache[layer_idx], block_tables, context_lens, **options
        )
        outputs = self.run(call)
        out = outputs[0].astype(q.dtype)
        return (out, outputs[1]) if len(outputs) > 1 else out

    def paged_attention_varlen(
        self,
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        cu_seqlens,
        layer_idx=0,
        **options: Any,
    ) -> mx.array:
        """As ``mlx_paged.paged_attention_varlen`` with lists of layers."""
        options.pop("check_tables", None)
        options.setdefault("scale", q.shape[-1] ** -0.5)
        tokens = q if q.ndim == 4 else q[:, :, None]
        caches = k, v = k_cache[layer_idx], v_cache[layer_idx]
        is_served = _ext.metal.serves_chunks(q.dtype, dims_of(k), dims_of(v))
        if not is_served or not (k.dtype == q.dtype or format_of(k).has_scales):
            options.pop("num_decodes", None)
            kind = {"causal": options.get("causal", True), "window": options.get("window")}
            arrays = q, *caches, block_tables, context_lens, cu_seqlens
            scales = {name: [options.pop(name)[layer_idx]] for name in SCALES if name in options}
            options |= scales
            out = self.paged_attention(*single_tokens(*arrays, **kind), **options)
            return out.reshape(*q.shape[:-1], -1)
        options = _of_layer(options, layer_idx)
        call = _ext.metal.plan_attention(
            tokens, *caches, block_tables, context_lens, cu_seqlens=cu_seqlens, **options
        )
        out = self.run(call)[0].astype(q.dtype)
        return out if q.ndim == 4 else out[:, :, 0]

    def write_kv(self, k, v, k_cache, v_cache, slot_mapping, **scales) -> tuple[mx.array, ...]:
        self.run(_ext.metal.plan_write_kv(k, v, k_cache, v_cache, slot_mapping, **scales))
        return k_cache, v_cache, *scales.values()

    def copy_blocks(self, k_cache, v_cache, block_pairs) -> tuple[mx.array, mx.array]:
        self.run(_ext.metal.plan_copy_blocks(k_cache, v_cache, block_pairs))
        return k_cache, v_cache

    def run(self, call: dict[str, Any]) -> list[mx.array]:
        """Launch everything; returns the outputs that are not inputs written in place."""
        inputs = _up_to_common_ends([memory(array) for array in call["inputs"]])
        fresh: list[mx.array] = []
        outputs = []
        for output in call["outputs"]:
            if isinstance(output, int):
                outputs.append(inputs[output])
                continue
            shape, dtype = output
            fresh.append(mx.zeros(shape, dtype))
            outputs.append(memory(fresh[-1]))
            outputs[-1].view(np.uint8)[:] = POISON  # every element has to be written
        scratch = [np.full(n, POISON, np.uint8) for n in call["scratch_bytes"]]
        arrays = {"input": inputs, "output": outputs, "scratch": scratch}
        arrays |= {"pool_read": inputs, "pool_write": outputs}
        for launch in call["launches"]:
            buffers: dict[int, Any] = {i: arrays[role][n] for i, role, n in launch["buffers"]}
            params_index, params = launch["params"]
            buffers[params_index] = np.frombuffer(params, np.uint8).copy()
            source = _mutated(launch["source"])
            library = _library(source, launch["kernel"], self.mode)
            result = library.launch(
                launch["kernel"],
                grid=launch["grid"],
                threadgroup=launch["threadgroup"],
                buffers=buffers,
                constants=launch["constants"],
                grid_in_threads=launch["grid_in_threads"],
                seed=self.seed,
            )
            self.trace.kernels.append(launch["kernel"])
            self.trace.pipelines.append(launch["pipeline"])
            self.trace.stats.append(result.stats)
        return fresh
