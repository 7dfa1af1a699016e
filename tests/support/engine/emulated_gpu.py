"""An engine as on a GPU, without one: it chooses the paths of attention that a GPU takes, and its
paged ops run as launch plans in the emulator."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.generate import generate_step

from mlx_paged import _ext, ops
from mlx_paged.attention import paths
from mlx_paged.attention.forward import path_counts
from mlx_paged.attention.paths import FEW_QUERIES
from mlx_paged.runner import layer_cache
from mlx_paged.runner.buckets import Buckets
from tests.support.models.tiny_models import tiny_model
from tests.support.ops.metal_runner import MetalRunner

LONG_CHUNK = 24
"""In place of a GPU's number, which is too large for an emulator."""

BLOCK_SIZE = 16

Logprobs = npt.NDArray[np.float64]  # [tokens, vocab]


def gpu_buckets(monkeypatch: pytest.MonkeyPatch) -> Buckets:
    """Let engines that are made from now on have a GPU's buckets."""
    with monkeypatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        buckets = Buckets.of_device(BLOCK_SIZE)
    monkeypatch.setattr(Buckets, "of_device", lambda _: buckets)
    return buckets


def emulate_gpu(monkeypatch: pytest.MonkeyPatch, metal: MetalRunner | None = None) -> MetalRunner:
    """Let engines that are made from now on run so; paths are counted from 0."""
    metal = metal or MetalRunner()
    metal.install(monkeypatch)
    monkeypatch.setattr(ops, "serves_chunks", _ext.metal.serves_chunks)
    monkeypatch.setattr(layer_cache, "max_paged_queries", lambda: FEW_QUERIES)
    monkeypatch.setattr(paths, "LONG_CHUNK", LONG_CHUNK)
    monkeypatch.setattr(paths, "HEADS_OF_MLX", range(65))
    path_counts.clear()
    return metal


class HalfModel:
    """A tiny model in half precision, what mlx-lm answers with it, and its weights in float32."""

    def __init__(self, model_type: str, dtype: mx.Dtype = mx.float16, **changes: object) -> None:
        self.model: nn.Module = tiny_model(model_type, **changes)
        self.model.set_dtype(dtype)
        self._exact: nn.Module = tiny_model(model_type, **changes)
        self._exact.update(self.model.parameters())
        self._exact.set_dtype(mx.float32)

    def check(self, prompt: list[int], tokens: list[int]) -> bool:
        """Whether these are mlx-lm's tokens. The first other one must be a near tie: in float32 the
        two tokens lie closer together than mlx-lm's rounding can bring any two."""
        steps = list(generate_step(mx.array(prompt), self.model, max_tokens=len(tokens)))
        expected = [int(token) for token, _ in steps]
        others = np.flatnonzero(np.array(tokens) != np.array(expected))
        for at in others[:1]:
            half = np.array(steps[at][1].astype(mx.float32), np.float64)
            exact = self._logprobs(prompt + expected[:at])
            margin = abs(exact[tokens[at]] - exact[expected[at]])
            assert margin <= 2 * np.abs(half - exact).max(), f"token {at} is no near tie"
        return not len(others)

    def _logprobs(self, tokens: list[int]) -> Logprobs:
        logits = np.array(self._exact(mx.array([tokens]))[0, -1], np.float64)
        return logits - np.log(np.exp(logits).sum())
