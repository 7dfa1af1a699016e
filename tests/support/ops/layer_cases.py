"""Arrays for the tests of ops that stand for layers on CPUs, and builds that pass them."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext
from tests.support import TIMEOUT

layers = _ext.layers

HALVES = (mx.float16, mx.bfloat16)
DTYPES = (mx.float32, *HALVES)
WIDTHS = (1, 7, 16, 70, 512)
BUILDS = ("baseline", "avx2", "avx512")


def random(*shape: int, dtype: mx.Dtype = mx.float32, scale: float = 1.0, seed: int = 0):
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return mx.array(values.astype(np.float32)).astype(dtype)


def laid_out(x: mx.array, layout: str) -> mx.array:
    """The same values elsewhere in memory, among NaNs where there is something between them."""
    if layout == "dense":
        return x
    if layout == "transposed":
        return mx.contiguous(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    nans = mx.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), x.dtype)
    at = slice(1, 1 + x.shape[-1]) if layout == "inner" else slice(1, 2 * x.shape[-1], 2)
    nans[..., at] = x
    mx.eval(nans)
    return nans[..., at]


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def assert_close(got: mx.array, want: np.ndarray, dtype: mx.Dtype, scale: float = 1.0) -> None:
    """Within a rounding of the dtype and what float32 adds to it, relative and absolute."""
    step = {mx.float32: 2**-22, mx.float16: 2**-10, mx.bfloat16: 2**-7}[dtype]
    assert got.dtype == dtype
    np.testing.assert_allclose(float64(got), want, rtol=step, atol=step * scale * 0.5)


def log_sum_exp(x: mx.array, words: mx.array | None = None) -> mx.array:
    return layers.likeliest(x, words)[..., :1].astype(x.dtype)


def assert_build_passes(build: str, file: str, names: str, cases: str) -> None:
    """Run tests of a file on a build of the kernels, or skip where this machine cannot run it.

    Args:
        cases: of the tests that run this one: those of a sample, or others. With the others the
            build passes all.
    """
    if build not in _ext.supported_kernels():
        pytest.skip(f"this machine cannot run the {build} build")
    child = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", names, file),
            *("--cases", "sample" if cases == "sample" else "all"),
        ],
        env={**os.environ, "MLX_PAGED_CPU": build},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert child.returncode == 0, child.stdout[-3000:]
