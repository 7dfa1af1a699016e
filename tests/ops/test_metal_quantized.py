"""Quantized pools in the emulator of Metal: writes are the CPU's, reads those of float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext, ops
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv.shapes import KVShape
from mlx_paged.ops import dispatch
from mlx_paged.ops.formats import FORMATS
from tests.metal_emulator import Mode
from tests.support.engine.refusing_gpu import RefusingGPU
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.numpy_quantization import BITS
from tests.support.ops.paged_cases import (
    MANY_OPTIONS,
    TOLERANCE,
    hide_blocks,
    leave_range,
    random_case,
    with_layout,
    worst_error,
)
from tests.support.ops.quantized_cases import quantized_case
from tests.support.ops.ragged_cases import LENGTHS, Ragged

HEADS, NUM_BLOCKS, BLOCK_SIZE = 3, 7, 4
SLOTS = [0, 27, 4, -1, 13, 28]
NAMES = {8: "k8v8", 6: "k6v6", 4: "k6v4"}
every_format = pytest.mark.parametrize("kv_bits", BITS)


@pytest.fixture(autouse=True)
def on_cpu():
    with mx.stream(mx.cpu):
        yield
    dispatch.forget()


def pool_of(kv_bits, dims, layout="NHSD"):
    """Keys, values and their scales, filled with numbers that no write leaves by chance."""
    slots = HEADS, NUM_BLOCKS, BLOCK_SIZE
    forms = list(zip(FORMATS[kv_bits], dims, strict=True))
    caches = [mx.full((*slots, form.columns(dim)), 85, form.dtype) for form, dim in forms]
    scales = [mx.full((*slots, form.scale_columns(dim)), 7, mx.float16) for form, dim in forms]
    return [with_layout(array, layout) for array in caches + scales]


def written(op, rows, pool, slots):
    k_cache, v_cache, k_scales, v_scales = pool
    arrays = *rows, k_cache, v_cache, mx.array(list(slots), mx.int32)
    return op(*arrays, k_scales=k_scales, v_scales=v_scales)


def assert_written_as_on_the_cpu(rows, kv_bits, layout="NHSD", slots=SLOTS, mode=Mode.RACE):
    """Slots of no row keep what they had."""
    dims = [x.shape[-1] for x in rows]
    metal = MetalRunner(mode)
    got = written(metal.write_kv, rows, pool_of(kv_bits, dims, layout), slots)
    want = written(ops.write_kv, rows, pool_of(kv_bits, dims), slots)
    assert [name.rpartition("_")[0] for name in metal.trace.kernels] == ["write_quantized"]
    for mine, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.array(mine), np.array(expected))


@pytest.mark.heavy
@pytest.mark.sampled(15)
@every_format
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (24, 8), (96, 200), (192, 128)], ids=str)
def test_writes(kv_bits, dtype, dims):
    rng = np.random.default_rng(3)
    rows = [mx.array(rng.standard_normal((6, HEADS, dim)) * 3 + 1).astype(dtype) for dim in dims]
    for layout in ("NHSD", "HNSD"):
        assert_written_as_on_the_cpu(rows, kv_bits, layout)
    assert_written_as_on_the_cpu(rows, kv_bits, mode=Mode.UBSAN)


@every_format
def test_writes_of_unusual_numbers(kv_bits):
    x = np.random.default_rng(4).standard_normal((9, HEADS, 96)).astype(np.float32)
    x[0] = 0
    x[1] *= 1e-6  # a scale below float16's normal numbers
    x[2] *= 1e-12  # a scale of zero
    x[3] *= 1e7  # a scale above float16's largest number
    x[4] = np.arange(96) % 16 - 7.5  # ties
    x[5, :, 1:] = x[5, :, :1]  # all equal
    x[6, 1, 70] = np.nan
    x[7, 0, 5] = np.inf
    x[8, 2, 95] = -np.inf
    rows = [mx.array(x), mx.array(-x)]
    assert_written_as_on_the_cpu(rows, kv_bits, slots=list(range(9)))


@every_format
def test_rows_need_not_be_contiguous(kv_bits):
    x = mx.array(np.random.default_rng(5).standard_normal((64, HEADS, 6)).astype(np.float32))
    assert_written_as_on_the_cpu([x.T, x.T], kv_bits)


@pytest.mark.sampled(2)
@every_format
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_blocks_are_copied_with_their_scales(kv_bits, dims):
    rng, metal = np.random.default_rng(6), MetalRunner(Mode.RACE)
    rows = [mx.array(rng.standard_normal((6, HEADS, dim)).astype(np.float32)) for dim in dims]
    pool = written(metal.write_kv, rows, pool_of(kv_bits, dims), SLOTS)
    before = [np.array(array) for array in pool]
    pairs = mx.array([[0, 1], [6, 0], [9, 2], [2, -1]])
    k, v, k_scales, v_scales = pool
    after = *metal.copy_blocks(k, v, pairs), *metal.copy_blocks(k_scales, v_scales, pairs)
    assert metal.trace.kernels[1:] == ["copy_blocks_uchar", "copy_blocks_half"]
    for array, old in zip(after, before, strict=True):
        old[:, 1], old[:, 0] = old[:, 0].copy(), old[:, 6].copy()
        np.testing.assert_array_equal(np.array(array), old)


def stored_rows(kv_bits, dims):
    """Six rows as a pool stores them."""
    rng, forms = np.random.default_rng(8), zip(FORMATS[kv_bits], dims, strict=True)
    shapes = [(form.dtype, (6, HEADS, form.columns(dim))) for form, dim in forms]
    return [mx.array(rng.integers(0, 1 << 16, shape)).astype(dtype) for dtype, shape in shapes]


def one_word_on(cache):
    """The same in memory whose rows have one word more, the first."""
    return mx.concatenate([cache[..., :1], cache], axis=-1)[..., 1:]


def assert_stored_as_on_the_cpu(rows, caches, mode=Mode.RACE):
    metal, slots = MetalRunner(mode), mx.array(SLOTS, mx.int32)
    want = ops.write_kv(*rows, *[mx.array(np.array(cache)) for cache in caches], slots)
    got = metal.write_kv(*rows, *caches, slots)
    assert metal.trace.kernels == ["write_kv_uchar"]
    for mine, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.array(mine), np.array(expected))


@pytest.mark.sampled(5)
@every_format
@pytest.mark.parametrize("dims", [(64, 64), (72, 72), (80, 80), (24, 8), (16, 120)], ids=str)
def test_stored_rows_go_to_their_slots(kv_bits, dims):
    rows = stored_rows(kv_bits, dims)
    for layout in ("NHSD", "HNSD"):
        assert_stored_as_on_the_cpu(rows, pool_of(kv_bits, dims, layout)[:2])
    assert_stored_as_on_the_cpu(rows, pool_of(kv_bits, dims)[:2], Mode.UBSAN)


@every_format
def test_stored_rows_and_their_caches_need_not_be_contiguous(kv_bits):
    rows = [mx.repeat(x, 2, axis=-1)[..., ::2] for x in stored_rows(kv_bits, (64, 64))]
    caches = [one_word_on(cache) for cache in pool_of(kv_bits, (64, 64))[:2]]
    assert_stored_as_on_the_cpu(rows, caches)
    assert_stored_as_on_the_cpu(rows, caches, Mode.UBSAN)


@every_format
@pytest.mark.parametrize("dim", [64, 72])
def test_a_pool_on_a_gpu_takes_stored_rows(kv_bits, dim, monkeypatch):
    gpu = RefusingGPU(monkeypatch)
    shape = KVShape(HEADS, dim, dim, mx.float16).quantized("test", kv_bits)
    pool = KVPool([shape], NUM_BLOCKS, BLOCK_SIZE)
    sizes = [(6, HEADS, array.shape[3]) for array in pool.targets(0).arrays[2:]]
    rows = stored_rows(kv_bits, (dim, dim))
    rows += [mx.random.normal(size).astype(mx.float16) for size in sizes]
    pool.write_stored(0, rows, mx.array(SLOTS, mx.int32))
    assert "write_kv_uchar" in gpu.runner.trace.kernels
    for array, mine in zip(pool.targets(0).arrays, rows, strict=True):
        found = array.reshape(HEADS, -1, array.shape[3])
        for row, slot in enumerate(SLOTS):
            if 0 <= slot < NUM_BLOCKS * BLOCK_SIZE:
                np.testing.assert_array_equal(np.array(found[:, slot]), np.array(mine[row]))


@pytest.mark.parametrize("kv_bits", [6, 4])
@pytest.mark.parametrize("dim", [64, 80])
def test_blocks_are_copied_where_elements_of_6_bits_begin_at_any_word(kv_bits, dim):
    shape = NUM_BLOCKS * BLOCK_SIZE, HEADS, dim
    rows = [mx.random.normal(shape) for _ in range(2)]
    pool = written(ops.write_kv, rows, pool_of(kv_bits, (dim, dim)), range(shape[0]))
    k_cache, v_cache = one_word_on(pool[0]), pool[1]
    before = [np.array(k_cache), np.array(v_cache)]
    after = MetalRunner(Mode.UBSAN).copy_blocks(k_cache, v_cache, mx.array([[0, 1], [6, 0]]))
    for array, old in zip(after, before, strict=True):
        old[:, 1], old[:, 0] = old[:, 0].copy(), old[:, 6].copy()
        np.testing.assert_array_equal(np.array(array), old)


def assert_like_float64(kv_bits, case, expected, kernel, metal=None):
    """Slots that nobody may read have NaN as scales."""
    metal = metal or MetalRunner(Mode.RACE)
    q, k_cache, v_cache, tables, lens = case.arrays
    out = metal.paged_attention(q, [k_cache], [v_cache], tables, lens, **case.options)
    form = NAMES[kv_bits]
    assert metal.trace.kernels[0].startswith(f"{kernel}_{form}_")
    assert out.dtype == q.dtype
    assert worst_error(out, expected.expected()[0]) < TOLERANCE[out.dtype]
    return metal


DIMS = [(64, 64), (128, 128), (96, 96), (24, 8), (192, 128), (256, 256), (64, 200)]


@pytest.mark.slow
@every_format
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_reads_of_the_tile_kernel(kv_bits, dtype, dims):
    sizes = {"head_dim": dims[0], "v_head_dim": dims[1], "num_heads": 2, "q_dtype": dtype}
    for contexts in ([0, 1, 45, 70], [700, 33]):
        case = quantized_case(kv_bits, contexts, num_kv_heads=2, dtype=mx.float32, **sizes)
        assert_like_float64(kv_bits, *case, "paged_attention")


@pytest.mark.slow
@every_format
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 20], ids=lambda n: f"L{n}")
@pytest.mark.parametrize("dims", [*DIMS[:3], *DIMS[4:]], ids=str)
def test_reads_of_the_matrix_kernel(kv_bits, dtype, num_tokens, dims):
    num_heads = 16 if num_tokens == 1 else 8  # groups of eight take the other kernel
    sizes = {"head_dim": dims[0], "v_head_dim": dims[1], "num_heads": num_heads, "num_kv_heads": 1}
    for contexts in ([20, 45, 70], [700, 33]):
        case = quantized_case(
            kv_bits, contexts, num_tokens=num_tokens, q_dtype=dtype, dtype=mx.float32, **sizes
        )
        assert_like_float64(kv_bits, *case, "matrix_attention")


@pytest.mark.slow
@every_format
@pytest.mark.parametrize("num_tokens", [1, 3], ids=lambda n: f"L{n}")
@pytest.mark.parametrize("options", [("bool_mask",), MANY_OPTIONS, ("non_causal",)], ids=str)
def test_reads_with_options(kv_bits, num_tokens, options):
    sizes = {"num_tokens": num_tokens, "options": options, "q_dtype": mx.float16}
    case = quantized_case(kv_bits, [45, 130], **sizes)
    kernel = "matrix_attention" if options == ("non_causal",) and num_tokens > 2 else None
    assert_like_float64(kv_bits, *case, kernel or "paged_attention")


@pytest.mark.heavy
@pytest.mark.sampled(16)
@every_format
@pytest.mark.parametrize("spoil", [hide_blocks, leave_range])
@pytest.mark.parametrize("num_tokens", [1, 20], ids=lambda n: f"L{n}")
@pytest.mark.parametrize("window", [None, 19])
def test_nothing_outside_the_pool_is_read(kv_bits, spoil, num_tokens, window):
    sizes = {"block_size": 8, "num_tokens": num_tokens, "q_dtype": mx.float16, "num_heads": 2}
    case, expected = quantized_case(kv_bits, [45, 45], **sizes, num_kv_heads=2)
    for each in (case, expected):
        spoil(each)
        each.options["window"] = window
    kernel = "paged_attention" if num_tokens == 1 else "matrix_attention"
    assert_like_float64(kv_bits, case, expected, kernel)


@pytest.mark.heavy
@every_format
def test_infinite_scales_do_not_reach_rows_that_do_not_see_them(kv_bits):
    """Only the last row of a chunk sees the last key, whose scales are no numbers."""
    sizes = {"num_tokens": 12, "q_dtype": mx.float16, "num_heads": 2, "num_kv_heads": 2}
    case, expected = quantized_case(kv_bits, [40], block_size=8, **sizes)
    block = int(case.block_tables[0, 4].item())
    for name in ("k_scales", "v_scales"):
        case.options[name][0][:, block, 7] = mx.nan
    metal = MetalRunner(Mode.RACE)
    q, k_cache, v_cache, tables, lens = case.arrays
    out = np.array(metal.paged_attention(q, [k_cache], [v_cache], tables, lens, **case.options))
    assert metal.trace.kernels[0].startswith(f"matrix_attention_{NAMES[kv_bits]}")
    want = expected.expected()[0]
    assert np.abs(out[:, :, :-1] - want[:, :, :-1]).max() < TOLERANCE[mx.float16]
    assert np.isnan(out[:, :, -1]).all()


@pytest.mark.sampled(10)
@every_format
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_sequences_of_different_lengths(kv_bits, lengths):
    contexts = [before + n for before, n in zip((40, 3, 0, 11, 64), lengths, strict=False)]
    case, expected = quantized_case(kv_bits, contexts)
    begins = mx.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    q = mx.random.normal((sum(lengths), 4, 64)).astype(mx.float16)
    tables, lens = case.block_tables, case.context_lens
    want = Ragged(q, (expected.k_cache, expected.v_cache), tables, lens, begins, expected.options)
    metal = MetalRunner(Mode.RACE)
    out = metal.paged_attention_varlen(
        q,
        [case.k_cache],
        [case.v_cache],
        tables,
        lens,
        begins,
        num_decodes=next((i for i, n in enumerate(lengths) if n != 1), 0),
        **case.options,
    )
    assert all(f"_{NAMES[kv_bits]}_" in name for name in metal.trace.kernels)
    assert worst_error(out, want.expected()) < TOLERANCE[mx.float16]


MOST_BYTES = {8: 0.52, 6: 0.4, 4: 0.35}
"""Of what float16 loads."""

SCALES = 17, 18
"""Buffer indices."""


@pytest.mark.sampled(12)
@every_format
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 16])
def test_reads_load_few_bytes(kv_bits, head_dim, group):
    sizes = {"head_dim": head_dim, "num_heads": group, "num_kv_heads": 1, "spare_columns": 0}
    case = quantized_case(kv_bits, [512, 45], q_dtype=mx.float16, **sizes)
    kernel = "paged_attention" if group == 1 else "matrix_attention"
    stats = assert_like_float64(kv_bits, *case, kernel).trace.stats[0]
    half = 2 * 2 * head_dim * (512 + 45)
    loaded = {i: stats.unique_loaded_bytes[i].per_threadgroup for i in (1, 2, *SCALES)}
    assert sum(loaded.values()) <= MOST_BYTES[kv_bits] * half
    assert loaded[17] == 2 * (512 + 45)
    assert stats.loaded_bytes[17] == loaded[17]


MOST_LOADS = {8: 1.25, 6: 1.45, 4: 1.5}
"""Of what float16 takes. Keys of 6 bits, which 4 bits have too, are three words of 2 bytes for 8
values of a lane: a load of 4 bytes and a load of 2, where float16 has one load of 16."""

COUNTS = {
    "loads": lambda s: sum(lines.load_instructions for lines in s.lines.values()),
    "simd operations": lambda s: s.simd_ops,
    "exponentials": lambda s: s.operations["exponential"].by_simdgroups,
    "barriers": lambda s: s.barriers + s.simdgroup_barriers,
}


@pytest.mark.sampled(12)
@every_format
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_reads_take_few_more_instructions_than_those_of_float16(kv_bits, head_dim, group):
    sizes = {"head_dim": head_dim, "num_heads": group, "num_kv_heads": 1, "spare_columns": 0}
    case = quantized_case(kv_bits, [512], q_dtype=mx.float16, **sizes)
    kernel = "matrix_attention" if group == 16 else "paged_attention"
    mine = assert_like_float64(kv_bits, *case, kernel).trace.stats[0]
    plain = random_case([512], dtype=mx.float16, **sizes)
    metal = MetalRunner(Mode.RACE)
    q, k_cache, v_cache, tables, lens = plain.arrays
    metal.paged_attention(q, [k_cache], [v_cache], tables, lens, **plain.options)
    for name, count in COUNTS.items():
        most = MOST_LOADS[kv_bits] if name == "loads" else 1.25
        assert count(mine) <= most * count(metal.trace.stats[0]), name


@pytest.mark.parametrize("name", ["paged_attention", "write_kv"])
def test_scales_that_turn_out_sparse_are_refused(name):
    """Nobody knows the layout of an array before it is evaluated."""
    k_cache, v_cache, k_scales, v_scales = pool_of(4, (64, 64))
    scales = {"k_scales": k_scales, "v_scales": mx.repeat(v_scales, 2, axis=-1)[..., ::2]}
    with pytest.raises(ValueError, match=rf"^\[{name}\] v_scales of shape .* has stride 2"):
        if name == "write_kv":
            rows = mx.zeros((1, HEADS, 64)), mx.zeros((1, HEADS, 64))
            _ext.metal.plan_write_kv(*rows, k_cache, v_cache, mx.array([0]), **scales)
        else:
            q, table = mx.zeros((1, HEADS, 1, 64)), (mx.array([[0]]), mx.array([1]))
            _ext.metal.plan_attention(q, k_cache, v_cache, *table, scale=1.0, **scales)
