"""Quantized pools: writes round as NumPy does, reads are those of float64 over what is stored."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.ops.formats import FORMATS, dequantized
from mlx_paged.options import checked_bits
from tests.support.devices import tolerance
from tests.support.ops.numpy_quantization import BITS, quantize
from tests.support.ops.paged_cases import (
    LAYOUTS,
    MANY_OPTIONS,
    TOLERANCE,
    hide_blocks,
    leave_range,
    primitives,
    require_kernel,
    with_layout,
    worst_error,
)
from tests.support.ops.quantized_cases import quantized_case
from tests.support.ops.ragged_cases import LENGTHS, Ragged

pytestmark = pytest.mark.usefixtures("on_cpu")


HEADS, NUM_BLOCKS, BLOCK_SIZE = 3, 7, 4
FLOATS = [mx.float32, mx.float16, mx.bfloat16]
every_format = pytest.mark.parametrize("kv_bits", BITS)


def empty_pool(kv_bits, dims=(64, 64), layout="NHSD"):
    """Keys, values, and their scales, filled with numbers that no write leaves by chance."""
    slots = HEADS, NUM_BLOCKS, BLOCK_SIZE
    forms = list(zip(FORMATS[kv_bits], dims, strict=True))
    caches = [mx.full((*slots, form.columns(dim)), 85, form.dtype) for form, dim in forms]
    scales = [mx.full((*slots, form.scale_columns(dim)), 7, mx.float16) for form, dim in forms]
    return [with_layout(array, layout) for array in caches + scales]


def write(rows, pool, slots):
    k_cache, v_cache, k_scales, v_scales = pool
    return ops.write_kv(
        *rows, k_cache, v_cache, mx.array(slots), k_scales=k_scales, v_scales=v_scales
    )


def assert_written_as_numpy(rows, kv_bits, kernel, layout="NHSD", slots=(0, 27, 4, -1, 13, 28)):
    """Slots of no row keep what they had."""
    require_kernel(kernel, *(x.shape[-1] for x in rows))
    pool = empty_pool(kv_bits, [x.shape[-1] for x in rows], layout)
    want = [np.array(array) for array in pool]
    for i, form in enumerate(FORMATS[kv_bits]):
        stored, scales = quantize(np.array(rows[i].astype(mx.float32)), form.bits)
        for row, slot in enumerate(slots):
            if 0 <= slot < NUM_BLOCKS * BLOCK_SIZE:
                want[i][:, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = stored[row]
                want[i + 2][:, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = scales[row]
    written = write(rows, pool, list(slots))
    assert ("WriteKV" in primitives(*written)) == (kernel == "native")
    for got, expected in zip(written, want, strict=True):
        np.testing.assert_array_equal(np.array(got), expected)


@pytest.mark.mac
@pytest.mark.sampled(4)
@every_format
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (8, 24), (96, 200)], ids=str)
def test_writes_round_as_numpy(kv_bits, dtype, layout, dims, kernel):
    rng = np.random.default_rng(3)
    rows = [mx.array(rng.standard_normal((6, HEADS, dim)) * 3 + 1).astype(dtype) for dim in dims]
    assert_written_as_numpy(rows, kv_bits, kernel, layout)


@every_format
def test_writes_of_unusual_numbers_round_as_numpy(kv_bits, kernel):
    x = np.random.default_rng(4).standard_normal((6, HEADS, 64)).astype(np.float32)
    x[0] = 0
    x[1] *= 1e-6  # a scale below float16's normal numbers
    x[2] *= 1e-12  # a scale of zero
    x[3] *= 1e7  # a scale above float16's largest number
    x[4] = np.arange(64) % 16 - 7.5  # ties
    x[5, :, 1:] = x[5, :, :1]  # all equal
    rows = [mx.array(x), mx.array(x)]
    slots = list(range(6))
    with np.errstate(over="ignore"):
        pool = empty_pool(kv_bits)
        written = write(rows, pool, slots)
        k, v = (quantize(x, form.bits) for form in FORMATS[kv_bits])
    for array, want in zip(written, (k[0], v[0], k[1], v[1]), strict=True):
        got = np.array(array).reshape(HEADS, -1, array.shape[-1])[:, :6].swapaxes(0, 1)
        if array.dtype != mx.float16:  # elements of a scale that is infinite have no meaning
            got, want = np.delete(got, 3, axis=0), np.delete(want, 3, axis=0)
        np.testing.assert_array_equal(got, want)


@every_format
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_finite_when_it_is_read(kv_bits, bad, kernel):
    x = np.ones((1, HEADS, 64), np.float32)
    x[0, 1, 5] = bad
    k, v, k_scales, v_scales = write([mx.array(x)] * 2, empty_pool(kv_bits), [9])
    for cache, scales in ((k, k_scales), (v, v_scales)):
        row = np.array(dequantized(cache, scales, mx.float32))[:, 2, 1]
        assert np.isfinite(row[[0, 2]]).all() and not np.isfinite(row[1]).any()


def test_rows_need_not_be_contiguous():
    x = mx.array(np.random.default_rng(5).standard_normal((64, HEADS, 6)).astype(np.float32))
    assert_written_as_numpy([x.T, x.T[..., ::-1]], 4, "native")


def assert_like_float64(case, expected, kernel, rows_kernel="PagedAttention"):
    arguments = case.q, [case.k_cache], [case.v_cache], case.block_tables, case.context_lens
    alone = ops.paged_attention(*arguments, **case.options)
    out, attn = ops.paged_attention(*arguments, **case.options, return_attn=True)
    assert (rows_kernel in primitives(out)) == (kernel == "native")
    want, want_attn = expected.expected()
    assert out.dtype == case.q.dtype
    assert worst_error(out, want) < tolerance(out.dtype, kernel)
    assert worst_error(attn, want_attn) < tolerance(mx.float32, kernel)
    assert mx.array_equal(alone, out)


@pytest.mark.mac
@pytest.mark.sampled(24)
@every_format
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40], ids=lambda n: f"L{n}")
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 200), (24, 8)], ids=str)
def test_reads(kv_bits, num_tokens, group, dims, kernel):
    sizes = {"head_dim": dims[0], "v_head_dim": dims[1], "num_heads": 2 * group}
    case = quantized_case(kv_bits, [0, 1, 45, 700], num_tokens=num_tokens, **sizes)
    assert_like_float64(*case, kernel)


@pytest.mark.sampled(4)
@every_format
@pytest.mark.parametrize("block_size", [1, 8, 16, 20, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_of_all_layouts(kv_bits, block_size, layout, kernel):
    case = quantized_case(kv_bits, [150, 33], block_size=block_size, layout=layout)
    assert_like_float64(*case, kernel)


@pytest.mark.sampled(4)
@every_format
@pytest.mark.parametrize("num_tokens", [1, 20], ids=lambda n: f"L{n}")
@pytest.mark.parametrize("options", [(), ("bool_mask",), MANY_OPTIONS, ("non_causal",)], ids=str)
@pytest.mark.parametrize("q_dtype", FLOATS, ids=str)
def test_reads_with_options(kv_bits, num_tokens, options, q_dtype, kernel):
    sizes = {"num_tokens": num_tokens, "options": options, "q_dtype": q_dtype}
    assert_like_float64(*quantized_case(kv_bits, [45, 130], **sizes), kernel)


@every_format
@pytest.mark.parametrize("spoil", [hide_blocks, leave_range])
@pytest.mark.parametrize("num_tokens", [1, 20], ids=lambda n: f"L{n}")
def test_nothing_outside_the_pool_is_read(kv_bits, spoil, num_tokens, kernel):
    case, expected = quantized_case(kv_bits, [45, 45], block_size=8, num_tokens=num_tokens)
    spoil(case)
    spoil(expected)
    case.options["check_tables"] = False
    assert_like_float64(case, expected, kernel)


@pytest.mark.mac
@pytest.mark.sampled(3)
@every_format
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_sequences_of_different_lengths(kv_bits, lengths, kernel):
    contexts = [before + n for before, n in zip((40, 3, 0, 11, 64), lengths, strict=False)]
    case, expected = quantized_case(kv_bits, contexts)
    begins = mx.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    q = mx.random.normal((sum(lengths), 4, 64))
    tables, lens = case.block_tables, case.context_lens

    def ragged(c):
        return Ragged(q, (c.k_cache, c.v_cache), tables, lens, begins, c.options)

    out = ragged(case).attend(num_decodes=next((i for i, n in enumerate(lengths) if n != 1), 0))
    assert worst_error(out, ragged(expected).expected()) < tolerance(mx.float32, kernel)


@every_format
def test_a_row_does_not_depend_on_the_batch(kv_bits):
    case, _ = quantized_case(kv_bits, [700, 90, 1300], num_heads=8)
    arrays = [case.k_cache], [case.v_cache]
    every = ops.paged_attention(
        case.q, *arrays, case.block_tables, case.context_lens, **case.options
    )
    for first, last in pairwise(range(4)):
        rows = case.q[first:last], *arrays, case.block_tables[first:last]
        alone = ops.paged_attention(*rows, case.context_lens[first:last], **case.options)
        assert mx.array_equal(alone[0], every[first])


@every_format
def test_layers_are_chosen(kv_bits):
    case, expected = quantized_case(kv_bits, [45])
    other, _ = quantized_case(kv_bits, [45], seed=1)
    caches = {
        "k_cache": [other.k_cache, case.k_cache],
        "v_cache": [other.v_cache, case.v_cache],
        "k_scales": [other.options["k_scales"][0], case.options["k_scales"][0]],
        "v_scales": [other.options["v_scales"][0], case.options["v_scales"][0]],
    }
    tables = {"block_tables": case.block_tables, "context_lens": case.context_lens}
    stacked = {name: mx.stack(arrays) for name, arrays in caches.items()}
    for arrays in (caches, stacked):
        out = ops.paged_attention(case.q, **arrays, **tables, layer_idx=1)
        assert worst_error(out, expected.expected()[0]) < TOLERANCE[mx.float32]


@pytest.mark.mac
@every_format
def test_blocks_are_copied(kv_bits, kernel):
    rows = [mx.random.normal((4, HEADS, 64)) for _ in range(2)]
    k, v, k_scales, v_scales = write(rows, empty_pool(kv_bits), [4, 5, 6, 7])
    before = [np.array(array) for array in (k, v, k_scales, v_scales)]
    pairs = mx.array([[1, 5]])
    after = *ops.copy_blocks(k, v, pairs), *ops.copy_blocks(k_scales, v_scales, pairs)
    for array, old in zip(after, before, strict=True):
        old[:, 5] = old[:, 1]
        np.testing.assert_array_equal(np.array(array), old)


class TestMistakes:
    def call(self, kv_bits=4, **changes):
        case, _ = quantized_case(kv_bits, [20])
        names = "q", "k_cache", "v_cache", "block_tables", "context_lens"
        arrays = dict(zip(names, case.arrays, strict=True)) | case.options
        arrays |= {name: change(arrays[name]) for name, change in changes.items()}
        for name in ("k_cache", "v_cache"):
            arrays[name] = [arrays[name]]
        return ops.paged_attention(**arrays)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"k_scales": lambda a: None}, "k_scales is missing: expected scales for both caches"),
            ({"v_scales": lambda a: None}, "v_scales is missing"),
            ({"v_scales": lambda a: [a[0].astype(mx.float32)]}, "v_scales .*: expected float16"),
            ({"v_scales": lambda a: [a[0][..., :1]]}, r"v_scales has shape .*2, 5, 16, 1.*: exp"),
            ({"k_scales": lambda a: [a[0][:, :1]]}, "k_scales has shape"),
            ({"k_scales": lambda a: a * 2}, "k_scales has 2 layers and k_cache 1"),
            ({"k_scales": lambda a: a[0]}, "k_scales has shape .*: expected .n_layers"),
            (
                {"k_cache": lambda a: a.astype(mx.float32)},
                "k_cache .*: with scales expected int8, or uint16",
            ),
            (
                {"v_cache": lambda a: a.astype(mx.int32)},
                "v_cache .* has uint16: with scales expected",
            ),
            (
                {"v_cache": lambda a: a.astype(mx.int8)},
                "v_cache .* has uint16: with scales expected",
            ),
            ({"k_cache": lambda a: a[..., :-1]}, "k_cache has shape .*: expected 3 words for each"),
            (
                {"k_scales": lambda a: None, "v_scales": lambda a: None},
                "k_cache .* has dtype uint16: expected float32, float16 or bfloat16, or k_scales",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else "-".join(value),
    )
    def test_arguments_that_do_not_fit(self, changes, message):
        self.call()
        with pytest.raises(ValueError, match=message):
            self.call(**changes)

    def test_rows_that_do_not_fit(self):
        pool = empty_pool(4)
        k, v = mx.zeros((2, HEADS, 64)), mx.zeros((2, HEADS, 64))
        write([k, v], pool, [0, 1])
        for rows, message in (
            ([k, v[..., :32]], r"v has shape .* expected \(2, 3, 64\)"),
            ([k, v.astype(mx.float16)], "v .* has dtype float16: expected k's float32"),
            ([k.astype(mx.int8), v], "k .* has dtype int8"),
        ):
            with pytest.raises(ValueError, match=message):
                write(rows, pool, [0, 1])

    @pytest.mark.parametrize("kv_bits", [5, 16, "5", "6,4", "8, 4", True, 8.0, "", "int8"])
    def test_other_bits(self, kv_bits):
        with pytest.raises(ValueError, match=r"kv_bits is .*: expected 8, 6 or 4\. .*docs/"):
            checked_bits("Engine", kv_bits)

    @pytest.mark.parametrize(
        ("given", "means"), [(None, None), (8, 8), ("8", 8), ("8,8", 8), (6, 6), ("6", 6), ("4", 4)]
    )
    def test_bits(self, given, means):
        assert checked_bits("Engine", given) == means
