"""The launch plans of the Metal kernels: what is launched, and what is refused before."""

import contextlib

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext
from mlx_paged.ops.formats import formats
from mlx_paged.runner.step_memory import PARTIALS
from tests.metal_emulator import require_emulator, typecheck
from tests.support.ops.numpy_quantization import BITS
from tests.support.ops.paged_cases import OPTIONS, TOLERANCE, random_case


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_address_spaces_and_types_are_right(dtype):
    require_emulator()
    case = random_case([5000], dtype=dtype, options=["sinks"])
    pools = case.k_cache, case.v_cache
    calls = [
        _ext.metal.plan_attention(*case.arrays, scale=1.0, **case.options),
        _ext.metal.plan_copy_blocks(*pools, mx.zeros((1, 2), mx.int32)),
    ]
    for launch in (launch for call in calls for launch in call["launches"]):
        assert typecheck(launch["source"]) == []


def test_nothing_to_do_launches_nothing():
    case = random_case([], num_heads=2)
    plan = _ext.metal.plan_attention(*case.arrays, scale=1.0)
    assert plan["launches"] == []
    pools = case.k_cache, case.v_cache
    assert _ext.metal.plan_copy_blocks(*pools, mx.zeros((0, 2), mx.int32))["launches"] == []


def test_a_grid_whose_product_is_a_multiple_of_2_to_the_32_is_launched():
    rows = mx.broadcast_to(mx.zeros((1, 1, 32)), (2**26, 8, 32))
    slots = mx.broadcast_to(mx.zeros((1,), mx.int32), (2**26,))
    pools = mx.zeros((8, 2, 4, 32)), mx.zeros((8, 2, 4, 32))
    (launch,) = _ext.metal.plan_write_kv(rows, rows, *pools, slots)["launches"]
    assert launch["grid"] == (8, 8, 2**26)


@pytest.mark.parametrize("kv_bits", [None, *BITS])
@pytest.mark.parametrize("dim", [8, 64, 72])
def test_keys_and_values_of_a_write_are_moved_as_the_type_that_its_kernel_has(kv_bits, dim):
    caches = [
        mx.zeros((2, 3, 4, form.columns(dim)), form.dtype) for form in formats(kv_bits, mx.float16)
    ]
    rows = [mx.zeros((5, 2, cache.shape[3]), cache.dtype) for cache in caches]
    (launch,) = _ext.metal.plan_write_kv(*rows, *caches, mx.zeros((5,), mx.int32))["launches"]
    size = {"write_kv<uchar>": 1, "write_kv<half>": 2}[launch["instantiation"]]
    params = launch["params"][1]
    strides = np.frombuffer(params[: 4 * 24], np.int64).reshape(4, 3)
    _, _, k_parts, v_parts, *_ = np.frombuffer(params[6 * 24 :], np.int32)
    each = size if launch["constants"][24] else 4 * size
    for cache, of_rows, of_cache, parts in zip(
        caches, strides[:2], strides[2:], (k_parts, v_parts), strict=True
    ):
        row = cache.shape[3] * cache.itemsize
        assert parts * each == row
        assert (of_rows * size).tolist() == [2 * row, row, size]
        assert (of_cache * size).tolist() == [12 * row, 4 * row, row]
    assert launch["grid"][0] == max(k_parts, v_parts)


def test_every_constant_is_in_the_pipelines_name():
    names = set()
    for option in (None, *OPTIONS):
        for block_size in (8, 16):
            case = random_case([5], block_size=block_size, options=[option] if option else [])
            plan = _ext.metal.plan_attention(*case.arrays, scale=1.0, **case.options)
            (launch,) = plan["launches"]
            names.add((launch["pipeline"], tuple(launch["constants"].items())))
    assert len({pipeline for pipeline, _ in names}) == len(names)
    assert len(names) == 2 * 11


def test_the_split_depends_on_shapes_alone():
    def splits(batch, keys, **options):
        tables = mx.zeros((batch, keys // 16), mx.int32)
        case = random_case([5])
        q = mx.broadcast_to(case.q, (batch, *case.q.shape[1:]))
        lens = mx.broadcast_to(case.context_lens, (batch,))
        pools = case.k_cache, case.v_cache
        call = _ext.metal.plan_attention(q, *pools, tables, lens, scale=1.0, **options)
        assert sum(call["scratch_bytes"]) <= PARTIALS
        return call["launches"][0]["grid"][2]

    assert [splits(1, keys) for keys in (512, 528, 4096, 2**15, 2**17)] == [1, 3, 16, 64, 64]
    assert [splits(batch, 4096) for batch in (7, 8)] == [16, 8]  # from 128 threadgroups on
    assert [splits(batch, 2**13) for batch in (32, 33, 64, 65)] == [16, 8, 8, 4]
    assert [splits(batch, 2**15) for batch in (64, 992, 993, 2**15)] == [16, 16, 15, 1]
    assert splits(1, 4096, return_attn=True) == 1


def test_pools_beyond_32_bit_offsets_are_refused():
    case = random_case([5], num_kv_heads=1)
    rows = mx.zeros((64,))
    for stride, is_refused in ((2**33 - 64, False), (2**33, True), (-64, True)):
        k_cache = mx.as_strided(rows, (1, 3, 1, 64), (64, stride, 64, 1), 0)
        arguments = case.q, k_cache, k_cache, case.block_tables, case.context_lens
        with (
            pytest.raises(RuntimeError, match="k_cache has strides")
            if is_refused
            else (contextlib.nullcontext())
        ):
            _ext.metal.plan_attention(*arguments, scale=1.0)


def test_unsupported_heads_are_named():
    assert _ext.metal.unsupported(64, 128) == ""
    assert "head dimension of 65" in _ext.metal.unsupported(64, 65)
    assert _ext.metal.unsupported(576, 512) == ""
    assert "head dimension of 580" in _ext.metal.unsupported(580, 64)
