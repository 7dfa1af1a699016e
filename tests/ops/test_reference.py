"""The references against definitions, contiguous attention and each other's independent code."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask

from mlx_paged.ops import fallback
from tests.support.ops.numpy_reference import (
    attention_numpy,
    build_slot_mapping,
    copy_blocks_numpy,
    paged_attention_numpy,
    write_kv_numpy,
)
from tests.support.ops.paged_cases import (
    FLOAT32_ERROR,
    MANY_OPTIONS,
    OPTIONS,
    TOLERANCE,
    random_case,
    worst_error,
)

pytestmark = pytest.mark.usefixtures("on_cpu")


HEADS, KV_HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 8, 16, 8


def dense_attention(q, k, v, causal=True):
    """Textbook attention of ``[H, L, D]`` over ``[H, n, D]``, by einsum."""
    scores = np.einsum("hld,hnd->hln", q, k) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[1:], k.shape[1] - q.shape[1]), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hln,hnd->hld", weights, v)


def random_kv(rng, num_tokens, v_dim=DIM):
    return (
        rng.standard_normal((num_tokens, KV_HEADS, DIM)),
        rng.standard_normal((num_tokens, KV_HEADS, v_dim)),
    )


def empty_pool(fill=np.nan, v_dim=DIM):
    return (
        np.full((KV_HEADS, NUM_BLOCKS, BLOCK_SIZE, DIM), fill),
        np.full((KV_HEADS, NUM_BLOCKS, BLOCK_SIZE, v_dim), fill),
    )


def per_query_head(rows):
    """``[n, H_kv, D]`` as ``[H, n, D]``: query head h reads KV head h // 2."""
    return rows.transpose(1, 0, 2)[[0, 0, 1, 1]]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


class TestSlotMapping:
    @pytest.mark.parametrize(
        ("start", "num_tokens", "slots"),
        [
            pytest.param(0, 1, [80], id="first"),
            pytest.param(14, 4, [94, 95, 192, 193], id="across_blocks"),
            pytest.param(16, 2, [192, 193], id="block_start"),
            pytest.param(31, 1, [207], id="decode_last_of_block"),
            pytest.param(32, 1, [48], id="decode_first_of_block"),
            pytest.param(34, 1, [50], id="decode_mid_block"),
            pytest.param(20, 0, [], id="empty"),
        ],
    )
    def test_formula_at_edges(self, start, num_tokens, slots):
        mapping = build_slot_mapping([5, 12, 3], BLOCK_SIZE, start, num_tokens)
        assert mapping.dtype == np.int64
        assert mapping.tolist() == slots

    def test_example_of_35_tokens(self):
        mapping = build_slot_mapping([5, 12, 3], BLOCK_SIZE, 0, 35)
        assert [mapping[t] for t in (0, 15, 16, 31, 32, 34)] == [80, 95, 192, 207, 48, 50]

    def test_empty_table(self):
        assert build_slot_mapping([], BLOCK_SIZE, 0, 0).tolist() == []

    @pytest.mark.parametrize(("start", "num_tokens"), [(47, 2), (-1, 2), (48, 1), (3, -1)])
    def test_positions_without_a_block_are_refused(self, start, num_tokens):
        with pytest.raises(ValueError, match=r"\[build_slot_mapping\] positions .* 0 to 47"):
            build_slot_mapping([5, 12, 3], BLOCK_SIZE, start, num_tokens)


class TestWrite:
    def test_write_then_gather_round_trips(self, rng):
        k, v = random_kv(rng, 35, v_dim=5)
        k_cache, v_cache = empty_pool(v_dim=5)
        slots = build_slot_mapping([5, 1, 3], BLOCK_SIZE, 0, 35)
        write_kv_numpy(k, v, k_cache, v_cache, slots)
        for t in range(35):
            block, offset = [5, 1, 3][t // BLOCK_SIZE], t % BLOCK_SIZE
            np.testing.assert_array_equal(k_cache[:, block, offset], k[t])
            np.testing.assert_array_equal(v_cache[:, block, offset], v[t])
        assert np.isnan(k_cache).sum() == k_cache.size - k.size
        assert np.isnan(v_cache).sum() == v_cache.size - v.size

    def test_slots_outside_the_pool_are_skipped(self, rng):
        k, v = random_kv(rng, 4)
        k_cache, v_cache = empty_pool(fill=0.0)
        write_kv_numpy(k, v, k_cache, v_cache, [-1, 3, NUM_BLOCKS * BLOCK_SIZE, -BLOCK_SIZE])
        assert np.count_nonzero(k_cache) == KV_HEADS * DIM
        np.testing.assert_array_equal(v_cache[:, 0, 3], v[1])

    def test_copy_blocks_keeps_order_and_skips_strangers(self):
        k_cache, v_cache = empty_pool(fill=0.0)
        k_cache[:] = np.arange(NUM_BLOCKS)[:, None, None]
        v_cache[:] = -k_cache
        copy_blocks_numpy(k_cache, v_cache, [(1, 2), (2, 3), (NUM_BLOCKS, 0), (4, -1), (5, 1)])
        assert k_cache[0, :, 0, 0].tolist() == [0, 5, 1, 1, 4, 5, 6, 7]
        assert v_cache[1, :, 3, 2].tolist() == [0, -5, -1, -1, -4, -5, -6, -7]


class TestIdentity:
    """Gathering through a table is the identity: a paged cache is a dense one, permuted."""

    def attend(self, k, v, table, seq_len, q, fill=np.nan):
        k_cache, v_cache = empty_pool(fill)
        slots = build_slot_mapping(table, BLOCK_SIZE, 0, seq_len)
        write_kv_numpy(k, v, k_cache, v_cache, slots)
        tables, lens = np.array([table], np.int32), np.array([seq_len], np.int32)
        return paged_attention_numpy(q, k_cache, v_cache, tables, lens, scale=DIM**-0.5)[0]

    @pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 35, 48])
    @pytest.mark.parametrize("fill", [1e6, np.nan], ids=["poison_1e6", "poison_nan"])
    def test_paged_equals_dense_under_a_shuffled_table(self, rng, seq_len, fill):
        k, v = random_kv(rng, seq_len)
        q = rng.standard_normal((1, HEADS, 1, DIM))
        out = self.attend(k, v, [6, 0, 3], seq_len, q, fill)
        dense = dense_attention(q[0], per_query_head(k), per_query_head(v))
        np.testing.assert_allclose(out, dense, rtol=0, atol=1e-12)

    def test_physical_layout_is_unobservable(self, rng):
        k, v = random_kv(rng, 35)
        q = rng.standard_normal((1, HEADS, 1, DIM))
        first = self.attend(k, v, [6, 0, 3], 35, q)
        second = self.attend(k, v, [2, 7, 5], 35, q)
        np.testing.assert_array_equal(first, second)

    def test_ragged_batch_equals_each_sequence_alone(self, rng):
        lens = [1, 35, 16, 45]
        tables = [[4, -1, 99], [6, 0, 3], [2, 4, 4], [7, 1, 5]]
        k_cache, v_cache = empty_pool()
        kv = [random_kv(rng, n) for n in lens]
        for (k, v), table, n in zip(kv, tables, lens, strict=True):
            write_kv_numpy(k, v, k_cache, v_cache, build_slot_mapping(table, BLOCK_SIZE, 0, n))
        q = rng.standard_normal((4, HEADS, 1, DIM))
        out = paged_attention_numpy(
            q, k_cache, v_cache, np.array(tables), np.array(lens), scale=DIM**-0.5
        )
        for b, (k, v) in enumerate(kv):
            dense = dense_attention(q[b], per_query_head(k), per_query_head(v))
            np.testing.assert_allclose(out[b], dense, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("first", [0, 5], ids="start{}".format)
    def test_chunked_writes_and_queries_equal_one_pass(self, rng, first):
        """40 tokens in chunks of 16, from a block's start and from its middle."""
        table, k_cache, v_cache = [6, 0, 3], *empty_pool()
        k, v = random_kv(rng, first + 40)
        q = rng.standard_normal((HEADS, first + 40, DIM))
        outputs = []
        bounds = [0, *range(first, first + 40, 16), first + 40]
        for start, stop in pairwise(bounds):
            slots = build_slot_mapping(table, BLOCK_SIZE, start, stop - start)
            write_kv_numpy(k[start:stop], v[start:stop], k_cache, v_cache, slots)
            chunk = (q[None, :, start:stop], k_cache, v_cache, np.array([table]), np.array([stop]))
            outputs.append(paged_attention_numpy(*chunk, scale=DIM**-0.5)[0])
        dense = dense_attention(q, per_query_head(k), per_query_head(v))
        np.testing.assert_allclose(np.concatenate(outputs, 1), dense, rtol=0, atol=1e-12)


class TestOptions:
    """Every option of the float64 reference against code that is not ours."""

    NUM_KEYS, NUM_TOKENS = 13, 3

    @pytest.fixture
    def qkv(self, rng):
        return (
            rng.standard_normal((HEADS, self.NUM_TOKENS, DIM)).astype(np.float32),
            rng.standard_normal((KV_HEADS, self.NUM_KEYS, DIM)).astype(np.float32),
            rng.standard_normal((KV_HEADS, self.NUM_KEYS, DIM)).astype(np.float32),
        )

    def assert_equals_mlx(self, qkv, numpy_options, mlx_options):
        out, _ = attention_numpy(*qkv, scale=0.4, **numpy_options)
        arrays = [mx.array(a)[None] for a in qkv]
        want = mx.fast.scaled_dot_product_attention(*arrays, scale=0.4, **mlx_options)
        assert worst_error(want, out[None]) < FLOAT32_ERROR

    def test_causal(self, qkv):
        self.assert_equals_mlx(qkv, {}, {"mask": "causal"})

    def test_non_causal(self, qkv):
        self.assert_equals_mlx(qkv, {"causal": False}, {})

    @pytest.mark.parametrize("window", [1, 4, 99])
    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "non_causal"])
    def test_window(self, qkv, window, causal):
        mask = create_causal_mask(self.NUM_TOKENS, self.NUM_KEYS - self.NUM_TOKENS, window)
        self.assert_equals_mlx(qkv, {"window": window, "causal": causal}, {"mask": mask})

    def test_sinks(self, qkv):
        sinks = np.array([-1, 0, 2, 9], np.float32)
        self.assert_equals_mlx(qkv, {"sinks": sinks}, {"sinks": mx.array(sinks), "mask": "causal"})

    def test_bool_mask(self, qkv, rng):
        mask = rng.random((1, self.NUM_TOKENS, self.NUM_KEYS)) < 0.6
        options = {"attn_mask": mask, "causal": False}
        self.assert_equals_mlx(qkv, options, {"mask": mx.array(mask)})

    def test_float_mask(self, qkv, rng):
        mask = rng.standard_normal((HEADS, 1, self.NUM_KEYS)).astype(np.float32)
        mask[:, :, ::3] = -np.inf
        options = {"attn_mask": mask, "causal": False}
        self.assert_equals_mlx(qkv, options, {"mask": mx.array(mask)[None]})

    def test_alibi(self, qkv):
        """With sinks, whose weight tells a score from a shifted one."""
        slopes = np.array([0.5, 0.25, 0.125, 0.0], np.float32)
        distance = np.arange(self.NUM_KEYS) - np.arange(self.NUM_KEYS)[-self.NUM_TOKENS :, None]
        bias = slopes[:, None, None] * distance.astype(np.float32)
        sinks = np.zeros(HEADS, np.float32)
        self.assert_equals_mlx(
            qkv,
            {"alibi_slopes": slopes, "causal": False, "sinks": sinks},
            {"mask": mx.array(bias)[None], "sinks": mx.array(sinks)},
        )

    @pytest.mark.parametrize("rotated", [DIM, DIM // 2], ids="dims{}".format)
    def test_rope(self, qkv, rotated):
        """Angles of position * base ** (-2i / R), as mx.fast.rope has them."""
        q, k, v = qkv
        positions = np.arange(self.NUM_KEYS)[-self.NUM_TOKENS :, None]
        angles = positions * 100.0 ** (-np.arange(0, rotated, 2) / rotated)
        out, _ = attention_numpy(q, k, v, scale=0.4, rope_freqs=angles)
        roped = mx.fast.rope(
            mx.array(q)[None],
            rotated,
            traditional=False,
            base=100.0,
            scale=1.0,
            offset=self.NUM_KEYS - self.NUM_TOKENS,
        )
        want, _ = attention_numpy(np.array(roped[0]), k, v, scale=0.4)
        np.testing.assert_allclose(out, want, rtol=0, atol=1e-6)

    def test_softcap_by_hand(self):
        q, k = np.array([[[2.0]]]), np.array([[[1.0], [0.0]]])
        _, weights = attention_numpy(q, k, k, scale=3.0, softcap=1.5)
        score = 1.5 * np.tanh(6.0 / 1.5)
        np.testing.assert_allclose(weights[0, 0, 0], 1 / (1 + np.exp(-score)), rtol=1e-12)

    def test_softcap_comes_before_the_mask(self):
        q, k = np.array([[[2.0]]]), np.array([[[1.0], [0.0]]])
        mask = np.array([[[0.0, 7.0]]])
        _, weights = attention_numpy(q, k, k, scale=3.0, softcap=1.5, attn_mask=mask)
        score = 1.5 * np.tanh(6.0 / 1.5)
        np.testing.assert_allclose(weights[0, 0, 0], 1 / (1 + np.exp(7 - score)), rtol=1e-12)

    def test_kv_head_mapping(self, qkv):
        q, k, v = qkv
        out, _ = attention_numpy(q, k, v, scale=0.4, kv_head_mapping=np.array([1, 0, 2, 0]))
        want, _ = attention_numpy(q, k[[1, 0, 0, 0]], v[[1, 0, 0, 0]], scale=0.4)
        np.testing.assert_array_equal(out[[0, 1, 3]], want[[0, 1, 3]])
        assert not out[2].any(), "KV head 2 does not exist"

    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "non_causal"])
    def test_queries_without_keys_yield_zeros(self, qkv, causal):
        q, k, v = qkv
        options = {"scale": 1.0, "causal": causal, "sinks": np.zeros(HEADS)}
        out, weights = attention_numpy(q, k[:, :2], v[:, :2], **options)
        assert not out[:, 0].any() and not weights[:, 0].any(), "position -1"
        assert out[:, 1:].all()
        mask = np.zeros((HEADS, self.NUM_TOKENS, self.NUM_KEYS), bool)
        assert not attention_numpy(q, k, v, **options, attn_mask=mask)[0].any()

    def test_weights_belong_to_the_output(self, qkv):
        out, weights = attention_numpy(*qkv, scale=0.4)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-12)
        np.testing.assert_allclose(weights @ qkv[2][[0, 0, 1, 1]], out, rtol=1e-12)


def test_blocks_outside_the_pool_are_not_attended():
    case = random_case([45], block_size=16, head_dim=DIM)
    tables, lens = np.array(case.block_tables), np.array([45])
    pools = [np.array(a) for a in (case.q, case.k_cache, case.v_cache)]
    hole = np.ones((1, 1, 1, tables.shape[1] * 16), bool)
    hole[..., 16:32] = False
    want = paged_attention_numpy(*pools, tables, lens, scale=1.0, attn_mask=hole)
    for stranger in (-1, -(2**31), pools[1].shape[1], 2**31 - 1):
        tables[0, 1] = stranger
        out = paged_attention_numpy(*pools, tables, lens, scale=1.0)
        np.testing.assert_array_equal(out, want)


class TestPlainMLX:
    """The vectorised reference against float64."""

    def assert_matches(self, case):
        want, want_attn = case.expected()
        options = {"scale": case.scale, **case.options}
        out, attn = fallback.paged_attention(*case.arrays, **options, return_attn=True)
        assert out.dtype == case.q.dtype
        assert worst_error(out, want) < TOLERANCE[case.q.dtype]
        assert worst_error(attn, want_attn) < FLOAT32_ERROR

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("num_tokens", [1, 5], ids="L{}".format)
    @pytest.mark.parametrize("option", [None, *OPTIONS])
    def test_every_option(self, option, num_tokens):
        options = [option] if option else []
        self.assert_matches(
            random_case([1, 45, 32, 3], num_tokens=num_tokens, options=options, v_head_dim=24)
        )

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    def test_dtypes(self, dtype):
        self.assert_matches(random_case([7, 45], dtype=dtype))

    def test_all_options_together(self):
        self.assert_matches(
            random_case([45, 5], num_tokens=3, num_heads=6, num_kv_heads=4, options=MANY_OPTIONS)
        )

    def test_data_out_of_range(self):
        case = random_case([45, 45, 45])
        tables = np.array(case.block_tables)
        tables[0, 0], tables[1, 1] = -1, 2**31 - 1
        case.block_tables = mx.array(tables)
        case.context_lens = mx.array([45, 45, -3])
        case.options["kv_head_mapping"] = mx.array([1, -1, 2, 0])
        self.assert_matches(case)

    @pytest.mark.parametrize("shape", ["no_blocks", "no_table", "no_sequences"])
    def test_nothing_to_attend(self, shape):
        case = random_case([] if shape == "no_sequences" else [5, 6])
        if shape == "no_blocks":
            case.k_cache, case.v_cache = case.k_cache[:, :0], case.v_cache[:, :0]
        if shape == "no_table":
            case.block_tables = case.block_tables[:, :0]
        self.assert_matches(case)
