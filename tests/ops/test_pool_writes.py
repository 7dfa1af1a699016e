"""Writes into the pool: what they write, that they write in place, and that pipelining copies
nothing."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.ops import fallback
from tests.support.ops.numpy_reference import copy_blocks_numpy, write_kv_numpy
from tests.support.ops.paged_cases import (
    LAYOUTS,
    as_numpy,
    memory_limit,
    primitives,
    require_kernel,
    with_layout,
)

pytestmark = pytest.mark.usefixtures("on_cpu")


HEADS, NUM_BLOCKS, BLOCK_SIZE = 3, 7, 4
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE

WIDTHS = pytest.mark.parametrize(("head_dim", "v_head_dim"), [(8, 8), (6, 3), (1, 5)], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)


def random(*shape, dtype=mx.float32):
    a = mx.random.normal(shape).astype(dtype)
    mx.eval(a)
    return a


def random_pool(head_dim=8, v_head_dim=8, dtype=mx.float32, layout="NHSD"):
    shape = (HEADS, NUM_BLOCKS, BLOCK_SIZE)
    return (
        with_layout(random(*shape, head_dim, dtype=dtype), layout),
        with_layout(random(*shape, v_head_dim, dtype=dtype), layout),
    )


def assert_same_bits(caches, expected):
    for cache, want in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(as_numpy(cache), want)


class TestWriteKV:
    def assert_matches_numpy(self, k, v, pool, slots, kernel):
        require_kernel(kernel, *(cache.shape[3] for cache in pool))
        expected = [as_numpy(cache) for cache in pool]
        write_kv_numpy(as_numpy(k), as_numpy(v), *expected, np.array(slots))
        written = ops.write_kv(k, v, *pool, slots)
        assert ("WriteKV" in primitives(*written)) == (kernel == "native")
        assert_same_bits(written, expected)

    @pytest.mark.mac
    @pytest.mark.sampled(4)
    @DTYPES
    @WIDTHS
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_rows_go_to_their_slots(self, dtype, head_dim, v_head_dim, layout, kernel):
        k = random(5, HEADS, head_dim, dtype=dtype)
        v = random(5, HEADS, v_head_dim, dtype=dtype)
        pool = random_pool(head_dim, v_head_dim, dtype, layout)
        slots = mx.array([0, NUM_SLOTS - 1, BLOCK_SIZE, BLOCK_SIZE - 1, 13])
        self.assert_matches_numpy(k, v, pool, slots, kernel)

    @pytest.mark.mac
    @pytest.mark.parametrize(
        "slots",
        [
            [-1, 5, NUM_SLOTS, 2],
            [5, -1, -1, -1],
            [-1, NUM_SLOTS, 2**31 - 1, -(2**31)],
            [-BLOCK_SIZE, -NUM_SLOTS, NUM_SLOTS + 1, 0],
        ],
        ids=str,
    )
    def test_slots_outside_the_pool_are_skipped(self, slots, kernel):
        k, v = random(4, HEADS, 8), random(4, HEADS, 8)
        self.assert_matches_numpy(k, v, random_pool(), mx.array(slots), kernel)

    def test_slots_may_be_unevaluated(self, kernel):
        k, v = random(4, HEADS, 8), random(4, HEADS, 8)
        slots = mx.array([-1, 5, NUM_SLOTS, 2]) + mx.zeros((), mx.int32)
        self.assert_matches_numpy(k, v, random_pool(), slots, kernel)

    @pytest.mark.mac
    def test_nan_goes_where_its_row_goes(self, kernel):
        """A value that a later read must see, and nothing else that it spoils."""
        k = mx.where(mx.arange(4)[:, None, None] == 1, mx.nan, random(4, HEADS, 8))
        self.assert_matches_numpy(k, k, random_pool(), mx.array([3, 4, -1, 5]), kernel)

    @pytest.mark.mac
    @pytest.mark.parametrize("view", ["chunk", "every_second", "last_axis_strided", "broadcast"])
    def test_rows_of_any_strides(self, view, kernel):
        make = {
            "chunk": lambda: random(1, HEADS, 4, 8)[0].transpose(1, 0, 2),
            "every_second": lambda: random(8, HEADS, 8)[::2],
            "last_axis_strided": lambda: random(8, HEADS, 4).T,
            "broadcast": lambda: mx.broadcast_to(random(1, HEADS, 1), (4, HEADS, 8)),
        }[view]
        k, v = make(), make()
        slots = mx.repeat(mx.array([9, 2, -1, 27]), 2)[::2]
        self.assert_matches_numpy(k, v, random_pool(), slots, kernel)

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("num_rows", [1, 4], ids="T{}".format)
    @pytest.mark.parametrize("axis", [0, 2])
    @pytest.mark.parametrize("step", [1, -1, 2], ids="step{}".format)
    @WIDTHS
    def test_rows_as_a_model_computes_them(
        self, head_dim, v_head_dim, step, axis, num_rows, kernel
    ):
        """One token of each sequence, or one sequence; both are views."""
        count = num_rows * abs(step)
        rows = [random(count, HEADS, dim)[::step] for dim in (head_dim, v_head_dim)]
        pool, slots = random_pool(head_dim, v_head_dim), mx.array([9, 2, -1, 27])[:num_rows]
        require_kernel(kernel, *(cache.shape[3] for cache in pool))
        expected = [as_numpy(cache) for cache in pool]
        write_kv_numpy(*map(as_numpy, rows), *expected, np.array(slots))
        given = [x.swapaxes(0, 1)[None] if axis else x[:, :, None] for x in rows]
        assert_same_bits(ops.write_kv(*given, *pool, slots), expected)

    def test_last_of_equal_slots_stays(self):
        k, v = random(3, HEADS, 8), random(3, HEADS, 8)
        self.assert_matches_numpy(k, v, random_pool(), mx.array([5, 5, 5]), "native")

    @pytest.mark.parametrize("num_blocks", [0, NUM_BLOCKS], ids="N{}".format)
    @pytest.mark.parametrize("num_rows", [0, 2], ids="T{}".format)
    def test_empty(self, num_blocks, num_rows, kernel):
        pool = [cache[:, :num_blocks] for cache in random_pool()]
        k, v = random(num_rows, HEADS, 8), random(num_rows, HEADS, 8)
        self.assert_matches_numpy(k, v, pool, mx.arange(num_rows), kernel)

    @pytest.mark.mac
    def test_many_rows(self, kernel):
        """Enough bytes for several threads."""
        num_rows, num_blocks = 4096, 300
        shape = (HEADS, num_blocks, 16, 64)
        pool = [with_layout(random(*shape), "NHSD") for _ in "kv"]
        slots = np.random.default_rng(0).permutation(num_blocks * 16)[:num_rows]
        k, v = random(num_rows, HEADS, 64), random(num_rows, HEADS, 64)
        self.assert_matches_numpy(k, v, pool, mx.array(slots.astype(np.int32)), kernel)

    @pytest.mark.parametrize(
        ("argument", "value", "message"),
        [
            ("k", mx.zeros((2, HEADS)), r"k has shape \(2, 3\)"),
            ("k", mx.zeros((2, HEADS + 1, 8)), "k has shape"),
            ("k", mx.zeros((2, HEADS, 1, 8)), "v has shape"),
            ("k", mx.zeros((2, HEADS, 2, 8)), r"k has shape \(2, 3, 2, 8\): .*num_tokens"),
            ("k", mx.zeros((2, HEADS, 8), mx.float16), "k .*dtype"),
            ("v", mx.zeros((3, HEADS, 8)), "v has shape"),
            ("v", mx.zeros((2, HEADS, 9)), "v has shape"),
            ("v", mx.zeros((2, HEADS, 8), mx.bfloat16), "v .*dtype"),
            ("k_cache", mx.zeros((HEADS, 5, BLOCK_SIZE, 8)), "v_cache has shape"),
            ("k_cache", mx.zeros((NUM_BLOCKS, BLOCK_SIZE, 8)), "k_cache has shape"),
            ("slot_mapping", mx.zeros((3,), mx.int32), "slot_mapping has shape"),
            ("slot_mapping", mx.zeros((2,), mx.int64), "slot_mapping .*int32"),
        ],
    )
    def test_wrong_arguments(self, argument, value, message, kernel):
        k_cache, v_cache = random_pool()
        arguments = {
            "k": mx.zeros((2, HEADS, 8)),
            "v": mx.zeros((2, HEADS, 8)),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slot_mapping": mx.zeros((2,), mx.int32),
        }
        with pytest.raises(ValueError, match=r"^\[write_kv\] .*" + message):
            ops.write_kv(**{**arguments, argument: value})


class TestCopyBlocks:
    @pytest.mark.mac
    @pytest.mark.sampled(6)
    @DTYPES
    @WIDTHS
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(
        "pairs",
        [
            [(0, 1)],
            [(6, 0), (1, 5)],
            [(1, 2), (2, 3), (3, 1)],
            [(0, 1), (2, 1)],
            [(4, 4), (-1, 2), (2, NUM_BLOCKS), (2**31 - 1, -(2**31)), (3, 0)],
            [(-1, 0)],
        ],
        ids=["one", "two", "chained", "twice", "strangers", "none"],
    )
    def test_pairs_in_order(self, dtype, head_dim, v_head_dim, layout, pairs, kernel):
        pool = random_pool(head_dim, v_head_dim, dtype, layout)
        expected = [as_numpy(cache) for cache in pool]
        copy_blocks_numpy(*expected, pairs)
        copied = ops.copy_blocks(*pool, mx.array(pairs, mx.int32))
        assert ("CopyBlocks" in primitives(*copied)) == (kernel == "native")
        assert_same_bits(copied, expected)

    @pytest.mark.parametrize("num_blocks", [0, NUM_BLOCKS], ids="N{}".format)
    def test_no_pairs(self, num_blocks, kernel):
        pool = [cache[:, :num_blocks] for cache in random_pool()]
        expected = [as_numpy(cache) for cache in pool]
        assert_same_bits(ops.copy_blocks(*pool, mx.zeros((0, 2), mx.int32)), expected)

    @pytest.mark.parametrize(
        ("pairs", "message"),
        [
            (mx.zeros((2,), mx.int32), r"block_pairs has shape \(2,\)"),
            (mx.zeros((2, 3), mx.int32), r"block_pairs has shape \(2, 3\)"),
            (mx.zeros((2, 2)), "block_pairs .*int32"),
        ],
    )
    def test_wrong_arguments(self, pairs, message, kernel):
        with pytest.raises(ValueError, match=r"^\[copy_blocks\] .*" + message):
            ops.copy_blocks(*random_pool(), pairs)


class TestSharedBuffers:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_handle_sees_the_new_bytes(self, layout):
        k_cache, v_cache = random_pool(layout=layout)
        view = k_cache[1:2]
        mx.eval(view)
        k, v = random(1, HEADS, 8), random(1, HEADS, 8)
        written = ops.write_kv(k, v, k_cache, v_cache, mx.array([9]))
        mx.eval(ops.copy_blocks(*written, mx.array([[2, 6]])))
        for block in (2, 6):
            assert mx.array_equal(k_cache[:, block, 1], k[0])
            assert mx.array_equal(v_cache[:, block, 1], v[0])
            assert mx.array_equal(view[0, block, 1], k[0, 1])

    def test_a_layer_of_one_large_array(self):
        caches = [mx.zeros((2, HEADS, NUM_BLOCKS, BLOCK_SIZE, 8)) for _ in "kv"]
        mx.eval(caches)
        rows = mx.ones((1, HEADS, 8))
        layer = [cache[1:2].squeeze(0) for cache in caches]
        mx.eval(ops.write_kv(rows, rows, *layer, mx.array([9])))
        for cache in caches:
            assert mx.array_equal(cache[1, :, 2, 1], rows[0])
            assert cache.sum().item() == rows.sum().item()

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_memory_does_not_grow(self, layout):
        """With the first handle alive, over a chain of lazy writes and copies."""
        k_cache, v_cache = first = [with_layout(mx.zeros((4, 512, 16, 64)), layout) for _ in "kv"]
        k, v = random(2, 4, 64), random(2, 4, 64)
        with memory_limit(first[0].nbytes // 16):
            for step in range(20):
                slots = mx.array([step, -1], mx.int32)
                k_cache, v_cache = ops.write_kv(k, v, k_cache, v_cache, slots)
                pairs = mx.array([[0, step + 1]], mx.int32)
                k_cache, v_cache = ops.copy_blocks(k_cache, v_cache, pairs)
            mx.eval(k_cache, v_cache)
        assert mx.array_equal(first[0][:, 17, 15], k[0])


class TestPipelining:
    """Decoding one step ahead: step t + 1 is launched before the token of step t is read, and only
    tokens are passed to async_eval. Every layer writes, then reads its pool through the new handle.

    A functional scatter copies the pool here, because the reader of step t still holds it when step
    t + 1 is launched; the in-place write must not. The model has few ops a step: MLX launches no
    more than about a hundred ahead.
    """

    LAYERS, HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 4, 64, 16, 2048
    CONTEXT, VOCABULARY = 8192, 256
    POOL_BYTES = HEADS * NUM_BLOCKS * BLOCK_SIZE * DIM * 4
    """Of the keys or the values of one layer: 32 MiB."""

    @pytest.fixture
    def decoder(self):
        """A function of (token, position, k handles, v handles, write) that returns the next token
        and rebinds the handles."""
        mx.random.seed(0)
        width = self.HEADS * self.DIM
        embedding, head = random(self.VOCABULARY, width), random(width, self.VOCABULARY)
        projections = [random(width, 3 * width) / 16 for _ in range(self.LAYERS)]
        blocks = np.random.default_rng(0).permutation(self.NUM_BLOCKS)
        tables = mx.array(blocks[None].astype(np.int32))
        mx.eval(projections, tables)

        def step(token, position, k, v, write):
            block, offset = divmod(position, self.BLOCK_SIZE)
            slots = mx.array([int(blocks[block]) * self.BLOCK_SIZE + offset])
            lens = mx.array([position + 1])
            x = embedding[token]
            for layer, projection in enumerate(projections):
                qkv = (x @ projection).reshape(1, 3 * self.HEADS, self.DIM)
                q, new_k, new_v = mx.split(qkv, 3, axis=1)
                k[layer], v[layer] = write(new_k, new_v, k[layer], v[layer], slots)
                q = q.reshape(1, self.HEADS, 1, self.DIM)
                x = ops.paged_attention(q, k, v, tables, lens, layer, scale=1.0).reshape(1, -1)
            return mx.argmax(x @ head, axis=-1)

        return step

    def pools(self):
        """Noise in every slot, repeated every 64 blocks: the context speaks from the first step."""
        shape = (64, self.HEADS, self.BLOCK_SIZE, self.DIM)
        keys = mx.random.split(mx.random.key(1), 2 * self.LAYERS)
        repeats = (self.NUM_BLOCKS // 64, 1, 1, 1)
        pools = [mx.tile(mx.random.normal(shape, key=key), repeats) for key in keys]
        mx.eval(pools)
        handles = [pool.transpose(1, 0, 2, 3) for pool in pools]
        return handles[: self.LAYERS], handles[self.LAYERS :]

    def decode(self, decoder, k, v, write, steps):
        """The tokens of these steps, launched one step ahead of what is read."""
        tokens, token = [], mx.array([7])
        for step in steps:
            ahead = decoder(token, self.CONTEXT + step, k, v, write)
            mx.async_eval(ahead)
            tokens.append(token.item())
            token = ahead
        return [*tokens, token.item()]

    def growth(self, decoder, write, num_steps):
        """Peak and final growth of memory in bytes, after two steps to settle."""
        k, v = self.pools()
        self.decode(decoder, k, v, write, range(2))
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        self.decode(decoder, k, v, write, range(2, 2 + num_steps))
        mx.synchronize()
        return mx.get_peak_memory() - before, mx.get_active_memory() - before

    def test_no_step_copies_a_pool(self, decoder):
        peak, active = self.growth(decoder, ops.write_kv, num_steps=20)
        assert peak < self.POOL_BYTES // 64
        assert active < 2**16

    @pytest.mark.slow
    def test_functional_scatter_does_copy(self, decoder):
        """The bound above would notice. Readers hold the old handles, as steps in flight do."""
        readers: list[mx.array] = []

        def write(new_k, new_v, k, v, slots):
            readers[:] = [*readers[-2:], k, v]
            return fallback.write_kv(new_k, new_v, k, v, slots)

        peak, _ = self.growth(decoder, write, num_steps=5)
        assert peak >= self.POOL_BYTES

    @pytest.mark.slow
    def test_tokens_equal_step_by_step_functional_writes(self, decoder):
        tokens = self.decode(decoder, *self.pools(), ops.write_kv, range(12))
        k, v = self.pools()
        token, expected = mx.array([7]), [7]
        for step in range(12):
            token = decoder(token, self.CONTEXT + step, k, v, fallback.write_kv)
            mx.eval(token, k, v)
            expected.append(token.item())
        assert tokens == expected
        assert len(set(tokens)) > 6
