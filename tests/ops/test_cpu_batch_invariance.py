"""The bits of a row of attention on a CPU depend on its own query, keys and values alone."""

import os
import subprocess
import sys
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext, ops
from tests.support import TIMEOUT

LENGTH, LONG_LENGTH, BLOCK_SIZE = 300, 1300, 16
SPANS = (0, 1), (5, 1), (100, 1), (255, 1), (200, 7), (128, 64), (60, 15), (60, 16), (10, 290)
LONG_SPANS = (0, 1), (511, 1), (512, 1), (1299, 1), (1020, 7), (500, 64), (900, 300)
SHAPES = (9, 3, 64), (8, 2, 128), (4, 4, 96), (6, 2, 80), (3, 1, 12), (32, 4, 40)
OPTIONS = {}, {"window": 33}, {"softcap": 5.0}, {"sinks": True}


def orders(length):
    """Two orders of the blocks of a context in memory."""
    count = -(-length // BLOCK_SIZE)
    return list(range(count)), [2 * i + 1 for i in range(count)][::-1]


def cache(rng, dtype, num_kv_heads, dim, order):
    """The same K or V in blocks that lie in another order in memory."""
    rows = rng.standard_normal((len(order), num_kv_heads, BLOCK_SIZE, dim)).astype(np.float32)
    blocks = np.full((2 * len(order), *rows.shape[1:]), np.nan, np.float32)
    blocks[order] = rows
    return mx.array(blocks).astype(dtype).transpose(1, 0, 2, 3)


class Attention:
    def __init__(self, shape, dtype, order, **options):
        rng, (heads, num_kv_heads, dim) = np.random.default_rng(1), shape
        self.k, self.v = (cache(rng, dtype, num_kv_heads, dim, order) for _ in range(2))
        length = len(order) * BLOCK_SIZE
        self.q = mx.array(rng.standard_normal((length, heads, 1, dim))).astype(dtype)
        per_head = mx.array(rng.standard_normal(heads).astype(np.float32))
        self.options = {k: per_head if v is True else v for k, v in options.items()}
        self.options |= {"scale": dim**-0.5, "layer_idx": 0}
        self.order = order

    def __call__(self, spans):
        """Rows of these spans, each of a sequence of its own, in one call; as bits."""
        rows = mx.concatenate([self.q[a : a + n] for a, n in spans])
        begins = np.cumsum([0] + [n for _, n in spans])
        tables = np.tile(np.array(self.order, np.int32), (len(spans), 1))
        found = ops.paged_attention_varlen(
            rows,
            [self.k],
            [self.v],
            block_tables=mx.array(tables),
            context_lens=mx.array([a + n for a, n in spans]),
            cu_seqlens=mx.array(begins.astype(np.int32)),
            **self.options,
        )
        bits = np.array(found.view(mx.uint8))
        return [bits[a:b] for a, b in pairwise(begins)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_a_row_has_the_same_bits_in_every_batch(dtype, shape, options):
    check_rows(LENGTH, SPANS, shape, dtype, options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"window": 600}], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_row_has_the_same_bits_where_contexts_are_split(dtype, options):
    check_rows(LONG_LENGTH, LONG_SPANS, (6, 2, 64), dtype, options)


def check_rows(length, spans, shape, dtype, options):
    [whole] = Attention(shape, dtype, orders(length)[0], **options)([(0, length)])
    assert whole.any()
    for order in orders(length):
        attention = Attention(shape, dtype, order, **options)
        for called in (*([span] for span in spans), spans):
            for (first, count), rows in zip(called, attention(called), strict=True):
                np.testing.assert_array_equal(rows, whole[first : first + count])


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("build", ["baseline", "avx2", "avx512"])
def test_every_build_and_number_of_threads_passes(build, threads):
    if build not in _ext.supported_kernels():
        pytest.skip(f"this machine cannot run the {build} build")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    child = subprocess.run(
        [*command, "-k", "same_bits", "--cases", "sample"],
        env=os.environ | {"MLX_PAGED_CPU": build, "MLX_PAGED_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert child.returncode == 0, child.stdout[-3000:]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_linear_layers_and_norms_are_computed_row_by_row(dtype):
    x, weight = (
        mx.random.normal((40, 576)).astype(dtype),
        mx.random.normal((100, 576)).astype(dtype),
    )
    packed = mx.quantize(weight, 32, 4)
    scale = mx.random.normal((576,)).astype(dtype)
    layers = _ext.layers
    for op in (
        lambda x: layers.linear(x, weight, None),
        lambda x: layers.quantized_linear(x, *packed, None, group_size=32, bits=4),
        lambda x: layers.rms_norm(x, scale, 1e-5),
        lambda x: layers.silu(x, x),
        lambda x: layers.likeliest(x, None),
    ):
        whole = op(x)
        for count in (1, 2, 3, 7, 8, 9, 15, 16, 17, 33):
            assert mx.array_equal(op(x[:count]), whole[:count], equal_nan=True)
            assert mx.array_equal(op(x[40 - count :]), whole[40 - count :], equal_nan=True)
