"""Attention of sequences with different numbers of tokens, decodes and chunks in one op."""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.ops import dispatch
from tests.support.devices import ROUNDOFF, tolerance
from tests.support.ops.paged_cases import (
    answer_by,
    as_numpy,
    primitives,
    require_kernel,
    worst_error,
)
from tests.support.ops.ragged_cases import LENGTHS, Ragged, ragged_case

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(params=["native", "reference", "single tokens"])
def kernel(request, monkeypatch):
    """The kernel; plain MLX; the dense op, as on a GPU without a kernel for chunks."""
    answer_by(monkeypatch, lambda *_: "reference" if request.param == "reference" else "native")
    if request.param == "single tokens":
        monkeypatch.setattr(dispatch, "serves_varlen", lambda *_: False)
    return request.param


@pytest.mark.parametrize(
    ("q_dtype", "dtype", "dims", "is_served"),
    [
        (mx.float16, mx.float16, (64, 64), True),
        (mx.bfloat16, mx.bfloat16, (576, 512), True),
        (mx.float32, mx.float32, (64, 64), False),
        (mx.float32, mx.float16, (64, 64), False),
        (mx.float16, mx.float16, (64, 60), False),
    ],
)
def test_gpus_have_a_kernel_for_some_pools(q_dtype, dtype, dims, is_served, monkeypatch):
    monkeypatch.setattr(dispatch._ext.metal, "has_metal", lambda: True)
    q = mx.zeros((1, 2, dims[0]), q_dtype)
    k, v = (mx.zeros((2, 1, 4, dim), dtype) for dim in dims)
    arrays = q, k, v, mx.zeros((1, 1), mx.int32)
    assert dispatch.serves_varlen(mx.gpu, *arrays) == is_served
    assert dispatch.serves_varlen(mx.cpu, *arrays)
    assert ops.serves_chunks(dtype, *dims) == (is_served or q_dtype != dtype)
    monkeypatch.setattr(dispatch._ext.metal, "has_metal", lambda: False)
    assert not dispatch.serves_varlen(mx.gpu, *arrays) and not ops.serves_chunks(dtype, *dims)


def assert_like_float64(case: Ragged, **overrides: Any) -> None:
    require_kernel("native", *(cache.shape[3] for cache in case.pool))
    out = case.attend(**overrides)
    assert out.dtype == case.q.dtype
    assert worst_error(out, case.expected()) < tolerance(out.dtype, "reference")


@pytest.mark.mac
@pytest.mark.sampled(4)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("block_size", [1, 16, 20])
def test_sequences_of_any_length_are_right(lengths, block_size, kernel):
    assert_like_float64(ragged_case(lengths, block_size=block_size))


@pytest.mark.mac
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [("non_causal",), ("window_1",), ("window_21", "sinks"), ("non_causal_window",), ("softcap",)],
    ids=str,
)
def test_every_option_is_right(options, kernel):
    assert_like_float64(ragged_case(LENGTHS["mixed"], options=options))


@pytest.mark.mac
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize("q_dtype", ROUNDOFF, ids=str)
def test_every_dtype_is_right(dtype, q_dtype, kernel):
    assert_like_float64(ragged_case([1, 12], dtype=dtype, q_dtype=q_dtype))


@pytest.mark.mac
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["HNSD", "NSHD"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=str)
def test_groups_and_pool_layouts_are_right(layout, heads, kernel):
    sizes = dict(zip(("num_heads", "num_kv_heads"), heads, strict=True))
    assert_like_float64(ragged_case([1, 1, 40], layout=layout, **sizes))


@pytest.mark.mac
@pytest.mark.parametrize("dims", [(64, 32), (65, 3), (256, 256)], ids=str)
def test_head_dimensions_are_right(dims, kernel):
    assert_like_float64(ragged_case([1, 1, 19], head_dim=dims[0], v_head_dim=dims[1]))


@pytest.mark.mac
def test_latents_are_right(kernel):
    assert_like_float64(ragged_case([1, 1, 19], latent=(64, 16)))


@pytest.mark.parametrize("num_decodes", [0, 1, 2])
def test_the_number_of_decodes_changes_nothing(num_decodes):
    case = ragged_case([1, 1, 19])
    assert mx.array_equal(case.attend(num_decodes=num_decodes), case.attend())


@pytest.mark.slow
def test_many_long_sequences_are_right():
    """So many that the splits of the chunk have no room: one thread computes all of a tile."""
    sizes = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 8, "v_head_dim": 256}
    assert_like_float64(ragged_case([1, 300], befores=(1400, 1300), **sizes))


def test_rows_with_an_axis_of_their_own_keep_it():
    case = ragged_case(LENGTHS["mixed"])
    flat, case.q = case.attend(), case.q[:, :, None]
    assert mx.array_equal(case.attend(), flat[:, :, None])


@pytest.mark.parametrize("axes", [(1, 0, 2), (2, 1, 0)], ids=str)
def test_queries_may_have_any_layout(axes):
    case = ragged_case(LENGTHS["mixed"])
    want = case.attend()
    order = np.argsort(axes).tolist()
    case.q = mx.contiguous(case.q.transpose(axes)).transpose(order)
    assert mx.array_equal(case.attend(), want)


def test_a_sequence_is_the_same_alone():
    """Whatever shares its op, down to the last bit."""
    case = ragged_case([1, 1, 5, 0, 70], befores=(700, 3, 600, 11, 1200))
    together = case.attend()
    begins = case.cu_seqlens.tolist()
    for s, (begin, end) in enumerate(pairwise(begins)):
        q = case.q[begin:end].transpose(1, 0, 2)[None]
        caches = [[cache] for cache in case.pool]
        alone = ops.paged_attention(q, *caches, case.tables[s : s + 1], case.lens[s : s + 1])
        assert mx.array_equal(together[begin:end], alone[0].transpose(1, 0, 2))


def test_tokens_of_no_sequence_are_zeros():
    """Nobody reads lengths that are not there."""
    case = ragged_case([5])
    k, v = case.pool
    starts = mx.zeros((1,), mx.int32) + 0  # not evaluated, so their values are not refused
    out = ops.paged_attention_varlen(
        case.q, [k], [v], case.tables[:0], case.lens[:0], starts, scale=1.0
    )
    assert out.shape == case.q.shape and not as_numpy(out).any()
    assert "PagedAttention" not in primitives(out)


def test_a_step_may_have_no_sequence_or_a_pool_no_block(kernel):
    case = ragged_case([1, 4])
    case.pool = tuple(cache[:, :0] for cache in case.pool)
    assert mx.array_equal(case.attend(check_tables=False), mx.zeros((5, 4, 64)))
    empty = ragged_case([])
    assert empty.attend().shape == (0, 4, 64)


class TestMistakes:
    @pytest.mark.parametrize(
        ("begins", "message"),
        [
            ([0, 1, 2], r"cu_seqlens\[2\] is 2: expected 6, the tokens of q"),
            ([1, 2, 6], r"cu_seqlens\[0\] is 1: expected 0, with num_decodes 1"),
            ([0, 2, 6], r"cu_seqlens\[1\] is 2: expected 1, with num_decodes 1"),
            ([0, 1, 0], r"cu_seqlens\[2\] is 0: expected 1, the entry before it, to 6"),
            ([0, 1, 7], r"cu_seqlens\[2\] is 7: expected 1, the entry before it, to 6"),
            ([0, 1], r"cu_seqlens has shape \(2,\) but block_tables has batch 2: expected \(3,\)"),
        ],
    )
    def test_wrong_cu_seqlens_are_refused(self, begins, message):
        case = ragged_case([1, 5])
        case.cu_seqlens = mx.array(begins)
        mx.eval(case.cu_seqlens)
        with pytest.raises(ValueError, match=r"^\[paged_attention_varlen\] " + message + "$"):
            case.attend(num_decodes=1)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("q", mx.zeros((6, 4, 2, 64)), r"q has shape \(6, 4, 2, 64\): expected \(num_tokens"),
            ("q", mx.zeros((6, 64)), r"q has shape \(6, 64\): expected \(num_tokens"),
            ("cu_seqlens", mx.array([0.0, 1, 6]), r"cu_seqlens .* has dtype float32: expected int"),
            ("lens", mx.array([1]), r"context_lens has shape \(1,\) but block_tables has batch 2"),
            ("tables", mx.array([1]), r"block_tables has shape \(1,\): expected \(batch, max_bl"),
        ],
    )
    def test_wrong_arrays_are_refused(self, name, value, message):
        case = ragged_case([1, 5])
        setattr(case, name, value)
        with pytest.raises(ValueError, match=r"^\[paged_attention_varlen\] " + message):
            case.attend()

    @pytest.mark.parametrize("num_decodes", [-1, 3, True, 1.0])
    def test_wrong_numbers_of_decodes_are_refused(self, num_decodes):
        with pytest.raises(ValueError, match=r"^\[paged_attention_varlen\] num_decodes is"):
            ragged_case([1, 5]).attend(num_decodes=num_decodes)

    @pytest.mark.parametrize(
        ("option", "value"), [("window", 0), ("scale", True), ("softcap", 0.0), ("layer_idx", 1)]
    )
    def test_wrong_options_are_refused(self, option, value):
        with pytest.raises(ValueError, match=rf"^\[paged_attention_varlen\] {option} is"):
            ragged_case([1, 5]).attend(**{option: value})

    @pytest.mark.parametrize(
        "begins", [[0, 1, 99], [-5, 1, 6], [0, 9, -3], [2**31 - 1, -(2**31), 6], [2, 3, 4]]
    )
    def test_wrong_values_read_nothing_outside(self, begins):
        """Tokens between the first and the last entry are right; those of no sequence are zeros."""
        case = ragged_case([1, 5])
        case.cu_seqlens = mx.array(begins)
        out = as_numpy(case.attend(check_tables=False))
        assert np.isfinite(out).all()
        if begins == [2, 3, 4]:
            assert not out[:2].any() and not out[4:].any()
            case.cu_seqlens, case.q = mx.array([0, 1, 2]), case.q[2:4]
            assert np.array_equal(out[2:4], as_numpy(case.attend()))


class TestTransforms:
    def test_gradients_are_those_of_the_dense_op(self):
        case = ragged_case([3, 3], befores=(5, 9), spare_columns=0)
        k, v = (mx.where(mx.isnan(cache), 0, cache) for cache in case.pool)
        tables = mx.where((case.tables >= 0) & (case.tables < k.shape[1]), case.tables, 0)

        def ragged(q, k, v):
            out = ops.paged_attention_varlen(q, [k], [v], tables, case.lens, case.cu_seqlens)
            return (out**2).sum()

        def dense(q, k, v):
            rows = q.reshape(2, 3, *q.shape[1:]).transpose(0, 2, 1, 3)
            return (ops.paged_attention(rows, [k], [v], tables, case.lens) ** 2).sum()

        got, want = (mx.grad(f, (0, 1, 2))(case.q, k, v) for f in (ragged, dense))
        for a, b in zip(got, want, strict=True):
            assert mx.allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_indices_may_come_of_a_deep_graph(self):
        """Whether MLX knows their values is found in each array once."""
        case = ragged_case([1, 4])
        tables, lens = mx.array(np.array(case.tables)), case.lens
        for _ in range(60):
            tables = mx.maximum(tables, tables - 1)

        def attend(q):
            return Ragged(q, case.pool, tables, lens, case.cu_seqlens, {}).attend()

        got = mx.vmap(attend)(case.q[None])[0]
        assert mx.allclose(got, attend(case.q), rtol=1e-4, atol=1e-5)

    def test_vmap_maps_queries(self):
        case = ragged_case([1, 4])
        many = mx.stack([case.q, 2 * case.q])

        def attend(q):
            return Ragged(q, case.pool, case.tables, case.lens, case.cu_seqlens, {}).attend()

        got = mx.vmap(attend)(many)
        assert mx.allclose(got, mx.stack([attend(q) for q in many]), rtol=1e-4, atol=1e-5)
