"""Plain MLX in place of this package's kernels, on MLX's CPU backend."""

import mlx.core as mx
import pytest

from mlx_paged import ops
from mlx_paged.ops import dispatch
from mlx_paged.runner import layer_cache


def compute_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of this package runs in an engine that is made from now on."""
    monkeypatch.setattr(dispatch, "kernel_on", lambda *_: "reference")
    monkeypatch.setattr(layer_cache, "max_paged_queries", lambda: 0)
    monkeypatch.setattr(ops, "pool_zeros", lambda shape, dtype, **_: mx.zeros(shape, dtype))
