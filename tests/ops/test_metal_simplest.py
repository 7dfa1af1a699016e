"""The simplest forms of the Metal kernels, which a GPU gets whose compiler refuses another form."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.ops import dispatch
from mlx_paged.ops.formats import FORMATS
from scripts.metal.sources import launches
from tests.metal_emulator import Mode
from tests.support.engine.refusing_gpu import MESSAGE, RefusingGPU
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.numpy_quantization import BITS
from tests.support.ops.paged_cases import (
    TOLERANCE,
    random_case,
    with_layout,
    worst_error,
)
from tests.support.ops.ragged_cases import LENGTHS, ragged_case

DTYPES = mx.float32, mx.float16, mx.bfloat16
HEADS, NUM_BLOCKS, BLOCK_SIZE = 3, 7, 4
SLOTS = [0, 27, 4, -1, 13, 28]
PAIRS = [[0, 1], [1, 2], [-1, 3], [4, 6], [6, 4], [3, -1], [5, 0]]
MODES = pytest.mark.parametrize("mode", [Mode.RACE, Mode.UBSAN], ids=str)


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    with mx.stream(mx.cpu):
        yield
    dispatch.forget()


def assert_equal_bits(got: Any, want: Any) -> None:
    for mine, expected in zip(got, want, strict=True):
        assert mine.dtype == expected.dtype
        kind = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[mine.itemsize]
        np.testing.assert_array_equal(np.array(mine.view(kind)), np.array(expected.view(kind)))


def rows_of(dims: tuple[int, int], dtype: mx.Dtype) -> list[mx.array]:
    """Six rows of keys and of values, with some unusual numbers, as columns of a wider array."""
    rng, rows = np.random.default_rng(3), []
    for dim in dims:
        numbers = rng.standard_normal((6, HEADS, 2 * dim)) * 3 + 1
        numbers[0], numbers[1] = 0, numbers[1] * 1e-6
        numbers[2, 1, 6], numbers[4, 2, 2] = np.nan, np.inf
        rows.append(mx.array(numbers).astype(dtype)[..., ::2])
    return rows


def pool_of(forms: Any, dims: tuple[int, int], layout: str) -> list[mx.array]:
    slots = HEADS, NUM_BLOCKS, BLOCK_SIZE
    pairs = list(zip(forms, dims, strict=True))
    caches = [mx.full((*slots, form.columns(dim)), 85, form.dtype) for form, dim in pairs]
    scales = [
        mx.full((*slots, form.scale_columns(dim)), 7, mx.float16)
        for form, dim in pairs
        if form.has_scales
    ]
    return [with_layout(array, layout) for array in caches + scales]


def plain_pool(dims: tuple[int, int], dtype: mx.Dtype, layout: str) -> list[mx.array]:
    slots = HEADS, NUM_BLOCKS, BLOCK_SIZE
    return [with_layout(mx.full((*slots, dim), 85, dtype), layout) for dim in dims]


def written(rows: list[mx.array], pool: list[mx.array], mode: Mode) -> tuple[Any, list[str]]:
    """A pool after a write in the emulator, and the kernels that ran."""
    metal = MetalRunner(mode)
    scales = dict(zip(("k_scales", "v_scales"), pool[2:], strict=False))
    found = metal.write_kv(*rows, *pool[:2], mx.array(SLOTS, mx.int32), **scales)
    return found, metal.trace.kernels


class TestWrites:
    @MODES
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("layout", ["NHSD", "HNSD"])
    def test_elements_are_written_as_vectors_are(self, dtype, layout, mode):
        for dims in ((64, 64), (24, 8), (4, 200)):
            rows = rows_of(dims, dtype)
            want, by_vectors = written(rows, plain_pool(dims, dtype, layout), mode)
            with ops.in_simplest_forms():
                got, by_elements = written(rows, plain_pool(dims, dtype, layout), mode)
            assert by_vectors[0].startswith("write_kv_")
            assert by_elements[0].startswith("write_elements_")
            assert_equal_bits(got, want)

    @MODES
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("kv_bits", BITS)
    def test_rows_are_quantized_as_by_simdgroups(self, kv_bits, dtype, mode):
        for dims, layout in (((64, 64), "NHSD"), ((24, 8), "HNSD"), ((96, 200), "NHSD")):
            rows = rows_of(dims, dtype)
            want, by_simdgroups = written(rows, pool_of(FORMATS[kv_bits], dims, layout), mode)
            with ops.in_simplest_forms():
                got, by_rows = written(rows, pool_of(FORMATS[kv_bits], dims, layout), mode)
            assert by_simdgroups[0].startswith("write_quantized_")
            assert by_rows[0].startswith("quantize_elements_")
            assert_equal_bits(got, want)

    @MODES
    @pytest.mark.parametrize("kv_bits", [None, *BITS])
    @pytest.mark.parametrize("pairs", [PAIRS, [[0, 1], [5, 4]]], ids=["in order", "apart"])
    def test_blocks_are_copied_as_by_vectors(self, kv_bits, pairs, mode):
        rng, found = np.random.default_rng(5), []
        shape = HEADS, NUM_BLOCKS, BLOCK_SIZE
        forms = FORMATS[kv_bits] if kv_bits else None
        kinds = [(f.columns(64), f.dtype) for f in forms] if forms else [(64, mx.bfloat16)] * 2
        numbers = [rng.integers(0, 100, (*shape, width)) for width, _ in kinds]
        for is_simplest in (False, True):
            arrays = [
                with_layout(mx.array(x).astype(kind), "NHSD")
                for x, (_, kind) in zip(numbers, kinds, strict=True)
            ]
            metal = MetalRunner(mode)
            if is_simplest:
                with ops.in_simplest_forms():
                    found.append(metal.copy_blocks(*arrays, mx.array(pairs)))
            else:
                found.append(metal.copy_blocks(*arrays, mx.array(pairs)))
            name = "copy_elements_" if is_simplest else "copy_blocks_"
            assert metal.trace.kernels[0].startswith(name)
        assert_equal_bits(found[1], found[0])


class TestAttention:
    @pytest.mark.heavy
    @pytest.mark.sampled(12)
    @MODES
    @pytest.mark.parametrize("group", [1, 4, 8])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        ("contexts", "tokens", "options"),
        [
            ([700, 3, 130], 1, ()),
            ([70, 33], 5, ()),
            ([600, 40], 1, ("window_21", "sinks", "softcap")),
            ([40, 21], 3, ("alibi", "float_mask", "partial_rope", "mapping")),
        ],
        ids=["long", "chunk", "options", "more options"],
    )
    def test_a_row_in_each_threadgroup_gives_the_result(
        self, contexts, tokens, options, dtype, group, mode
    ):
        case = random_case(
            contexts, num_heads=2 * group, num_tokens=tokens, dtype=dtype, options=options
        )
        metal = MetalRunner(mode)
        q, k_cache, v_cache, *arrays = case.arrays
        with ops.in_simplest_forms():
            out = metal.paged_attention(q, [k_cache], [v_cache], *arrays, **case.options)
        (kernel,) = metal.trace.kernels
        assert kernel.startswith("paged_attention_") and kernel.endswith("_r1_s4")
        assert worst_error(out, case.expected()[0]) < TOLERANCE[dtype]

    @pytest.mark.heavy
    @MODES
    @pytest.mark.parametrize("group", [1, 4])
    @pytest.mark.parametrize("num_decodes", [0, 2])
    def test_a_ragged_batch_has_the_fewest_rows_and_no_splits(self, num_decodes, group, mode):
        case = ragged_case(
            LENGTHS["mixed"],
            befores=(700, 3, 0, 11, 600),
            num_heads=2 * group,
            dtype=mx.float16,
        )
        metal = MetalRunner(mode)
        caches = ([cache] for cache in case.pool)
        with ops.in_simplest_forms():
            out = metal.paged_attention_varlen(
                case.q, *caches, case.tables, case.lens, case.cu_seqlens, num_decodes=num_decodes
            )
        chunks, *decodes = metal.trace.kernels
        assert chunks.startswith("matrix_attention_") and chunks.endswith("_r8")
        assert [name.rpartition("_r")[2] for name in decodes] == ["1_s4"] * bool(num_decodes)
        assert worst_error(out, case.expected()) < TOLERANCE[mx.float16]


class TestRefusals:
    """What the compiler is asked, and what runs then. The GPU here plans a call at once, a real one
    when the result is evaluated, after the question: so each call is made twice."""

    def attend(self, gpu: RefusingGPU, contexts: list[int], **options: Any) -> list[str]:
        """The kernels of a call whose result is right."""
        case = random_case(contexts, num_heads=8, dtype=mx.float16)
        q, k_cache, v_cache, *arrays = case.arrays
        for _ in range(2):
            gpu.runner.trace.kernels.clear()
            out = ops.paged_attention(q, [k_cache], [v_cache], *arrays, **options)
        assert worst_error(out, case.expected()[0]) < TOLERANCE[mx.float16]
        return list(gpu.runner.trace.kernels)

    @pytest.mark.heavy
    def test_a_split_that_is_refused_is_not_split(self, monkeypatch, caplog):
        gpu = RefusingGPU(monkeypatch)
        wanted = self.attend(gpu, [700, 3])
        assert len(wanted) == 2 and "_r1_" not in wanted[0]
        gpu = RefusingGPU(monkeypatch, wanted[0])
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                (simplest,) = self.attend(gpu, [700, 3])
                assert simplest.endswith("_r1_s4")
        assert dispatch.refused == {wanted[0]: MESSAGE} and not dispatch.plain
        assert [MESSAGE in record.getMessage() for record in caplog.records] == [True]

    def test_a_merge_that_is_refused_is_not_needed(self, monkeypatch):
        gpu = RefusingGPU(monkeypatch, "merge_splits")
        (simplest,) = self.attend(gpu, [700, 3])
        assert simplest.endswith("_r1_s4") and not dispatch.plain

    def test_all_forms_may_be_refused(self, monkeypatch):
        gpu = RefusingGPU(monkeypatch, "paged_attention", "matrix_attention")
        assert self.attend(gpu, [700, 3]) == []
        assert dispatch.plain and dispatch.plain <= {*dispatch.refused}

    def write(self, gpu: RefusingGPU) -> tuple[tuple[mx.array, ...], list[str]]:
        rows = rows_of((64, 64), mx.bfloat16)
        for _ in range(2):
            gpu.runner.trace.kernels.clear()
            pool = [mx.zeros((HEADS, NUM_BLOCKS, BLOCK_SIZE, 64), mx.bfloat16) for _ in range(2)]
            found = ops.write_kv(*rows, *pool, mx.array(SLOTS, mx.int32))
        return found, gpu.runner.trace.kernels

    def test_a_write_that_is_refused_is_by_elements(self, monkeypatch):
        want, kernels = self.write(RefusingGPU(monkeypatch))
        assert kernels == ["write_kv_bfloat"]
        got, kernels = self.write(RefusingGPU(monkeypatch, "write_kv"))
        assert kernels == ["write_elements_bfloat"]
        assert_equal_bits(got, want)
        assert dispatch.refused == {"write_kv_bfloat": MESSAGE} and not dispatch.plain

    def test_plain_mlx_writes_if_both_are_refused(self, monkeypatch):
        want, _ = self.write(RefusingGPU(monkeypatch))
        got, kernels = self.write(RefusingGPU(monkeypatch, "write_kv", "write_elements"))
        assert kernels == []
        assert_equal_bits(got, want)
        assert {*dispatch.refused} == {"write_kv_bfloat", "write_elements_bfloat"}
        assert dispatch.plain == {"write_elements_bfloat"}

    def test_another_process_asks_again(self, monkeypatch):
        """And so does who forgets what was refused."""
        self.write(RefusingGPU(monkeypatch, "write_kv"))
        _, kernels = self.write(RefusingGPU(monkeypatch))
        assert kernels == ["write_kv_bfloat"]


@pytest.mark.parametrize("kernel", ["write_elements", "quantize_elements", "copy_elements"])
def test_a_simplest_kernel_has_nothing_that_may_be_refused_elsewhere(kernel):
    """No vector, no function constant, no simdgroup, and no header with one."""
    sources = {each["source"] for each in launches() if each["kernel"].startswith(kernel)}
    assert len(sources) >= len(DTYPES)
    for source in sources:
        code = re.sub("//.*", "", source)
        for word in ("vec<", "function_constant", "simd", "threadgroup", "#pragma", "_Pragma"):
            assert word not in code
