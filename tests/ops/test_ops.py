"""Attention through block tables against float64, on the compiled kernel and on plain MLX."""

import doctest

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged import ops
from mlx_paged.ops import paged
from tests.support.devices import tolerance
from tests.support.ops.paged_cases import (
    LAYOUTS,
    MANY_OPTIONS,
    OPTIONS,
    TOLERANCE,
    as_numpy,
    assert_matches_float64,
    attend,
    memory_limit,
    random_case,
    with_layout,
    worst_error,
)

pytestmark = pytest.mark.usefixtures("on_cpu")


DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def strided(a):
    """The same values, two elements apart, axes in reversed order in memory."""
    spread = mx.repeat(mx.contiguous(a.T), 2, axis=0).T[..., ::2]
    mx.eval(spread)
    return spread


@pytest.mark.mac
class TestAttention:
    """Every spare slot is NaN; tables end in ids of poisoned blocks and of none."""

    @pytest.mark.sampled(3)
    @DTYPES
    @pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32], ids="S{}".format)
    def test_block_sizes(self, dtype, block_size, kernel):
        contexts = sorted({1, max(1, block_size - 1), block_size, block_size + 1, 45})
        assert_matches_float64(random_case(contexts, block_size=block_size, dtype=dtype), kernel)

    @pytest.mark.sampled(3)
    @DTYPES
    @pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256], ids="D{}".format)
    def test_head_dims(self, dtype, head_dim, kernel):
        assert_matches_float64(random_case([45, 7], head_dim=head_dim, dtype=dtype), kernel)

    @pytest.mark.parametrize(
        ("head_dim", "v_head_dim"), [(64, 128), (192, 128), (40, 1), (1, 40), (65, 33)]
    )
    def test_values_of_another_width(self, head_dim, v_head_dim, kernel):
        assert_matches_float64(
            random_case([45, 7], head_dim=head_dim, v_head_dim=v_head_dim), kernel
        )

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads"),
        [(2, 2), (8, 2), (14, 2), (16, 2), (5, 1), (40, 1), (3, 3)],
        ids="H{}".format,
    )
    @pytest.mark.parametrize("num_tokens", [1, 3], ids="L{}".format)
    def test_grouped_heads(self, num_heads, num_kv_heads, num_tokens, kernel):
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        assert_matches_float64(random_case([45, 16], num_tokens=num_tokens, **heads), kernel)

    @pytest.mark.parametrize("mapping", [[0, 0, 0], [2, 0, 1], [1, 1, 0]], ids=str)
    @pytest.mark.parametrize("num_tokens", [1, 3], ids="L{}".format)
    def test_any_head_mapping(self, mapping, num_tokens, kernel):
        case = random_case([45, 7], num_heads=3, num_kv_heads=3, num_tokens=num_tokens)
        case.options["kv_head_mapping"] = mx.array(mapping)
        assert_matches_float64(case, kernel)

    def test_heads_of_no_kv_head_beside_many_others(self):
        """A thread takes heads of a long batch together. Unevaluated mappings are not checked."""
        case = random_case([45] * 99)
        mapping = mx.array([0, 1, 0, 7])
        out, _ = attend(case, kv_head_mapping=mapping + 0)
        case.options["kv_head_mapping"] = mx.array([0, 1, 0, 1])
        want, _ = case.expected()
        want[:, 3] = 0
        assert worst_error(out, want) < tolerance(mx.float32)

    @pytest.mark.sampled(6)
    @pytest.mark.parametrize("context", [1, 15, 16, 17, 45, 4097], ids="ctx{}".format)
    @pytest.mark.parametrize("num_tokens", [1, 2, 50], ids="L{}".format)
    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "non_causal"])
    def test_contexts(self, context, num_tokens, causal):
        """With a context shorter than L the first queries have negative positions."""
        case = random_case([context], num_tokens=num_tokens)
        case.options["causal"] = causal
        assert_matches_float64(case)

    @pytest.mark.sampled(9)
    @pytest.mark.parametrize("num_tokens", [1, 5], ids="L{}".format)
    @pytest.mark.parametrize("option", OPTIONS)
    def test_every_option(self, option, num_tokens, kernel):
        contexts = [1, 45, 32, 3, 0, 1500]
        case = random_case(contexts, num_tokens=num_tokens, head_dim=32, options=[option])
        assert_matches_float64(case, kernel)

    @DTYPES
    def test_all_options_together(self, dtype, kernel):
        case = random_case(
            [45, 5, 100],
            num_tokens=3,
            num_heads=6,
            num_kv_heads=4,
            dtype=dtype,
            options=MANY_OPTIONS,
        )
        assert_matches_float64(case, kernel)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("shape", [(4, 1, 1, 64), (1, 4, 3, 64), (3, 64), (64,)], ids=str)
    @pytest.mark.parametrize("dtype", [mx.bool_, mx.float32, mx.float16, mx.bfloat16], ids=str)
    def test_masks_broadcast(self, shape, dtype, kernel):
        case = random_case([45, 17, 33, 48], num_tokens=3)
        values = np.random.default_rng(1).integers(0, 2, shape)
        case.options["attn_mask"] = mx.array(values).astype(dtype)
        assert_matches_float64(case, kernel)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("hidden", [range(0, 2500), range(100, 2200), range(1, 3000)], ids=str)
    @pytest.mark.parametrize("num_tokens", [1, 3], ids="L{}".format)
    @pytest.mark.parametrize("as_float", [False, True], ids=["bool", "float"])
    def test_masked_keys_may_hold_anything(self, hidden, num_tokens, as_float, kernel):
        """A mask that hides runs of blocks, NaN behind it."""
        case = random_case([3000], num_tokens=num_tokens, head_dim=16)
        mask = np.ones(case.block_tables.shape[1] * 16, bool)
        mask[hidden] = False
        poison = np.full((2, 16, 16), np.nan)
        k_cache, v_cache = as_numpy(case.k_cache), as_numpy(case.v_cache)
        for logical in range(-(-hidden.start // 16), hidden.stop // 16):
            block = case.block_tables[0, logical].item()
            k_cache[:, block], v_cache[:, block] = poison, poison
        case.k_cache, case.v_cache = mx.array(k_cache, mx.float32), mx.array(v_cache, mx.float32)
        case.options["attn_mask"] = mx.array(np.where(mask, 0, -np.inf) if as_float else mask)
        assert_matches_float64(case, kernel)

    def test_rope_freqs_of_single_tokens(self, kernel):
        case = random_case([45, 7], options=["rope"])
        want, _ = attend(case, kernel)
        case.options["rope_freqs"] = case.options["rope_freqs"][:, 0]
        got, _ = attend(case, kernel)
        assert mx.array_equal(got, want)

    @pytest.mark.parametrize(
        ("q_dtype", "dtype"),
        [(mx.float32, mx.bfloat16), (mx.bfloat16, mx.float32), (mx.float16, mx.bfloat16)],
        ids=str,
    )
    def test_queries_of_another_dtype(self, q_dtype, dtype, kernel):
        assert_matches_float64(random_case([45, 7], q_dtype=q_dtype, dtype=dtype), kernel)

    def test_weights_sum_to_one(self, kernel):
        _, attn = attend(random_case([1, 45, 700]), kernel)
        assert np.abs(as_numpy(attn).sum(axis=-1) - 1).max() < tolerance(mx.float32, kernel)

    def test_long_context(self, kernel):
        """16384 positive numbers of one size, added in float32, are 5e-6 off."""
        case = random_case([16384, 3], head_dim=32)
        out, attn = attend(case, kernel)
        want, want_attn = case.expected()
        assert worst_error(out, want) < 1e-5
        assert worst_error(attn, want_attn) < 1e-5

    def test_scores_beyond_the_range_of_exp(self, kernel):
        """Scores near 500 are rounded by 3e-5, and their exponentials by as much in proportion."""
        case = random_case([45, 700])
        case.options["scale"] = 20.0
        out, _ = attend(case, kernel)
        assert worst_error(out, case.expected()[0]) < 1e-4

    def test_worked_example(self):
        result = doctest.testmod(paged)
        assert result.attempted and not result.failed

    @pytest.mark.slow
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(data=st.data())
    def test_random_shapes(self, data):
        block_size = data.draw(st.sampled_from([1, 2, 5, 16, 33]), "block_size")
        contexts = data.draw(st.lists(st.integers(0, 5 * block_size), max_size=4), "contexts")
        num_kv_heads = data.draw(st.integers(1, 3), "num_kv_heads")
        case = random_case(
            contexts,
            num_heads=num_kv_heads * data.draw(st.integers(1, 9), "group"),
            num_kv_heads=num_kv_heads,
            head_dim=data.draw(st.integers(8, 70), "head_dim"),
            v_head_dim=data.draw(st.integers(16, 70), "v_head_dim"),
            block_size=block_size,
            num_tokens=data.draw(st.integers(1, 6), "num_tokens"),
            dtype=data.draw(st.sampled_from(list(TOLERANCE)), "dtype"),
            layout=data.draw(st.sampled_from(list(LAYOUTS)), "layout"),
            options=data.draw(st.sets(st.sampled_from(list(OPTIONS)), max_size=4), "options"),
            seed=data.draw(st.integers(0, 2**16), "seed"),
        )
        assert_matches_float64(case)


@pytest.mark.mac
class TestContiguousParity:
    """MLX's own attention on the same keys and values, gathered."""

    @pytest.mark.parametrize("num_tokens", [1, 7], ids="L{}".format)
    @pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "non_causal"])
    def test_equals_mlx(self, num_tokens, with_sinks, causal):
        contexts = [45, 16, 300]
        case = random_case(contexts, num_tokens=num_tokens)
        sinks = mx.array([-1.0, 0.0, 2.0, 5.0]) if with_sinks else None
        out, _ = attend(case, sinks=sinks, causal=causal)
        for b, context in enumerate(contexts):
            k, v = (
                cache[:, case.block_tables[b, : -(-context // 16)]].reshape(1, 2, -1, 64)
                for cache in (case.k_cache, case.v_cache)
            )
            want = mx.fast.scaled_dot_product_attention(
                case.q[b : b + 1],
                k[:, :, :context],
                v[:, :, :context],
                scale=case.scale,
                mask="causal" if causal else None,
                sinks=sinks,
            )
            error = worst_error(out[b : b + 1], as_numpy(want))
            assert error < tolerance(mx.float32) + tolerance(mx.float32, "reference")


class TestLayouts:
    @pytest.mark.sampled(3)
    @DTYPES
    @pytest.mark.parametrize("num_tokens", [1, 5], ids="L{}".format)
    @pytest.mark.parametrize("options", [(), ("window_21",)], ids=["plain", "window"])
    def test_physical_order_is_unobservable(self, dtype, num_tokens, options, kernel):
        """A window starts anywhere in a block."""
        shape = {"num_tokens": num_tokens, "layout": "HNSD"}
        case = random_case([45, 700], dtype=dtype, options=options, **shape)
        outs = []
        for k_layout, v_layout in [("HNSD", "HNSD"), ("NHSD", "NSHD"), ("NSHD", "NHSD")]:
            case.k_cache = with_layout(case.k_cache, k_layout)
            case.v_cache = with_layout(case.v_cache, v_layout)
            outs.append(attend(case, kernel)[0])
        assert mx.array_equal(outs[0], outs[1]) and mx.array_equal(outs[0], outs[2])

    def test_placement_of_blocks_is_unobservable(self, kernel):
        case = random_case([45, 700])
        want, _ = attend(case, kernel)
        order = np.random.default_rng(1).permutation(case.k_cache.shape[1])
        case.k_cache, case.v_cache = (
            cache[:, mx.array(order)] for cache in (case.k_cache, case.v_cache)
        )
        tables = np.array(case.block_tables)
        inside = (tables >= 0) & (tables < len(order))
        tables[inside] = np.argsort(order)[tables[inside]]
        case.block_tables = mx.array(tables)
        got, _ = attend(case, kernel)
        assert mx.array_equal(got, want)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_no_layout_copies_the_pool(self, layout):
        pool = with_layout(mx.zeros((4, 512, 16, 64)), layout)
        q, tables, lens = mx.zeros((1, 4, 1, 64)), mx.array([[3, 500]]), mx.array([20])
        with memory_limit(pool.nbytes // 16):
            mx.eval(ops.paged_attention(q, [pool], [pool], tables, lens))

    @pytest.mark.slow
    def test_rows_of_queries_are_not_copied(self):
        """[T, H, 1, D] as a model makes it: a transposed [T, 1, H, D]."""
        q = mx.random.normal((8192, 1, 8, 64)).transpose(0, 2, 1, 3)
        cache = [mx.random.normal((1, 1, 16, 64))]
        tables, lens = mx.zeros((8192, 1), mx.int32), mx.ones((8192,), mx.int32)
        mx.eval(q, cache, tables, lens)
        with memory_limit(q.nbytes * 5 // 4):  # the output's
            out = ops.paged_attention(q, cache, cache, tables, lens)
            mx.eval(out)
        assert mx.array_equal(out, mx.broadcast_to(cache[0][:, 0, 0], out.shape))

    @DTYPES
    def test_queries_of_any_strides(self, dtype, kernel):
        case = random_case([45, 7], num_tokens=3, dtype=dtype)
        want, _ = attend(case, kernel)
        case.q = mx.contiguous(case.q.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0)
        got, _ = attend(case, kernel)
        assert mx.array_equal(got, want)

    def test_other_arguments_of_any_strides(self, kernel):
        options = ["mapping", "sinks", "alibi", "float_mask", "rope"]
        case = random_case([45, 7, 300], num_tokens=2, options=options)
        want, _ = attend(case, kernel)
        case.block_tables = strided(case.block_tables)
        case.context_lens = strided(case.context_lens)
        case.options = {name: strided(value) for name, value in case.options.items()}
        got, _ = attend(case, kernel)
        assert mx.array_equal(got, want)

    def test_many_rows_equal_one(self):
        """As many as to need more memory for partial results than the kernel takes."""
        case = random_case([1025], num_heads=16, num_kv_heads=1, head_dim=8, v_head_dim=1024)
        assert_matches_float64(case)
        want, _ = attend(case)
        case.q = mx.repeat(case.q, 64, axis=0)
        case.block_tables = mx.repeat(case.block_tables, 64, axis=0)
        case.context_lens = mx.repeat(case.context_lens, 64)
        got, _ = attend(case)
        assert mx.array_equal(got, mx.broadcast_to(want, got.shape))

    def test_a_sequence_does_not_depend_on_its_batch(self, kernel):
        contexts = [45, 1, 3000, 16]
        case = random_case(contexts)
        batch, _ = attend(case, kernel)
        q, tables, lens = case.q, case.block_tables, case.context_lens
        for b in range(len(contexts)):
            case.q, case.block_tables = q[b : b + 1], tables[b : b + 1]
            case.context_lens = lens[b : b + 1]
            alone, _ = attend(case, kernel)
            if kernel == "native":
                assert mx.array_equal(alone[0], batch[b])
            else:
                assert mx.allclose(alone[0], batch[b], atol=1e-6)
