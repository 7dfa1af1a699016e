"""Which views of memory an op takes as a pool, and when it refuses the others."""

import mlx.core as mx
import pytest

from mlx_paged import copy_blocks, ops, paged_attention, write_kv

pytestmark = pytest.mark.usefixtures("on_cpu")


HEADS, NUM_BLOCKS, BLOCK_SIZE, DIM = 4, 4, 6, 8


@pytest.fixture(params=["native", "reference"])
def kernel(request, monkeypatch):
    """Both answers; a CPU stream would always choose the compiled kernel."""
    monkeypatch.setattr(ops, "kernel_for", lambda *_: request.param)
    return request.param


def memory(*shape, is_evaluated=True):
    a = mx.random.normal(shape or (HEADS, NUM_BLOCKS, BLOCK_SIZE, DIM))
    if is_evaluated:
        mx.eval(a)
    return a


def attend(k_cache, v_cache):
    q = mx.ones((1, k_cache.shape[0], 1, k_cache.shape[-1]))
    tables, lens = mx.array([[k_cache.shape[1] - 1, 0]]), mx.array([k_cache.shape[2] + 1])
    return paged_attention(q, [k_cache], [v_cache], tables, lens)


def write(k_cache, v_cache):
    heads = k_cache.shape[0]
    k, v = mx.full((1, heads, k_cache.shape[-1]), 5.0), mx.full((1, heads, v_cache.shape[-1]), 7.0)
    return write_kv(k, v, k_cache, v_cache, mx.array([1]))


def copy(k_cache, v_cache):
    return copy_blocks(k_cache, v_cache, mx.array([[0, 1], [1, 2]]))


OPS = {"paged_attention": attend, "write_kv": write, "copy_blocks": copy}
WRITERS = {"write_kv": write, "copy_blocks": copy}

SPARSE_VIEWS = {
    "columns": lambda a: a[..., ::2],
    "reversed": lambda a: a[..., ::-1],
    "swapped": lambda a: a.swapaxes(-1, -2),
    "of_views": lambda a: a.swapaxes(0, 1)[:, 1:][..., ::3].swapaxes(0, 1),
}


@pytest.mark.parametrize("op", OPS)
class TestLastAxis:
    """Elements of a row that do not follow one another."""

    MESSAGE = r"^\[{}\] {} of shape .* has stride -?\d+ on its last axis: expected 1"

    def call(self, op, argument, sparse):
        dense = memory(*sparse.shape)
        return OPS[op](*((sparse, dense) if argument == "k_cache" else (dense, sparse)))

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("argument", ["k_cache", "v_cache"])
    @pytest.mark.parametrize("view", SPARSE_VIEWS)
    @pytest.mark.parametrize("is_evaluated", [True, False])
    def test_is_refused_at_once_where_it_is_known(self, op, argument, view, is_evaluated, kernel):
        sparse = SPARSE_VIEWS[view](memory())
        if is_evaluated:
            mx.eval(sparse)
        with pytest.raises(ValueError, match=self.MESSAGE.format(op, argument)):
            self.call(op, argument, sparse)

    @pytest.mark.parametrize("argument", ["k_cache", "v_cache"])
    def test_is_refused_at_evaluation_where_it_is_not(self, op, argument):
        result = self.call(op, argument, memory(is_evaluated=False)[..., ::2])
        with pytest.raises(ValueError, match=self.MESSAGE.format(op, argument)):
            mx.eval(result)

    def test_of_one_column_may_have_any_stride(self, op, kernel):
        mx.eval(self.call(op, "k_cache", memory()[..., :1, :].swapaxes(-1, -2)))


def test_a_layer_of_one_sparse_array_is_refused(kernel):
    k_cache, v_cache = (
        memory(3, HEADS, NUM_BLOCKS, BLOCK_SIZE, DIM)[..., ::2],
        memory(3, 4, 4, 6, 4),
    )
    q, tables, lens = mx.ones((1, HEADS, 1, 4)), mx.array([[0]]), mx.array([1])
    with pytest.raises(ValueError, match=r"k_cache of shape .* has stride 2 on its last axis"):
        paged_attention(q, k_cache, v_cache, tables, lens, layer_idx=2)


def test_views_whose_rows_are_dense_are_read(kernel):
    """Slices, steps backwards, transposes and squeezed axes; values that are columns of keys."""
    pool = memory(2, 3, BLOCK_SIZE, 7, DIM)[1:, :2].squeeze(0).swapaxes(1, 2)[:, 1::3][:, ::-1]
    values = pool[..., : DIM // 2]
    want = attend(mx.contiguous(pool), mx.contiguous(values))
    assert mx.allclose(attend(pool, values), want, atol=1e-6)


SHARING_VIEWS = {
    "first_columns": lambda a: (a, a[..., : DIM // 2]),
    "last_columns": lambda a: (a, a[..., DIM // 2 :]),
    "some_columns_of_both": lambda a: (a[..., :5], a[..., 4:]),
    "in_another_order": lambda a: (a.swapaxes(0, 1), a.swapaxes(0, 1)),
}
SEPARATE_VIEWS = {
    "columns": lambda a: (a[..., :5], a[..., 5:]),
    "halves_of_heads": lambda a: (a[:2], a[2:]),
    "every_second_block": lambda a: (a[:, ::2], a[:, 1::2]),
}


@pytest.mark.parametrize("op", WRITERS)
class TestMemoryOfWriters:
    """Two rows written to one place would leave one of them."""

    MESSAGE = r"^\[{}\] v_cache of shape .* shares memory with k_cache of shape .*: expected two"

    @pytest.mark.parametrize("is_evaluated", [True, False])
    def test_one_array_as_both_caches_is_refused(self, op, is_evaluated, kernel):
        pool = memory(is_evaluated=is_evaluated)
        with pytest.raises(ValueError, match=self.MESSAGE.format(op)):
            WRITERS[op](pool, pool)

    @pytest.mark.parametrize("view", SHARING_VIEWS)
    @pytest.mark.parametrize("is_evaluated", [True, False])
    def test_shared_rows_are_refused_at_once_where_they_are_known(
        self, op, view, is_evaluated, kernel
    ):
        caches = SHARING_VIEWS[view](memory())
        if is_evaluated:
            mx.eval(caches)
        with pytest.raises(ValueError, match=self.MESSAGE.format(op)):
            WRITERS[op](*caches)

    @pytest.mark.parametrize("view", SHARING_VIEWS)
    def test_shared_rows_are_refused_at_evaluation_where_they_are_not(self, op, view):
        pool = memory(is_evaluated=False)
        result = WRITERS[op](*SHARING_VIEWS[view](pool))
        with pytest.raises(ValueError, match=self.MESSAGE.format(op)):
            mx.eval(result)

    @pytest.mark.parametrize("view", SEPARATE_VIEWS)
    @pytest.mark.parametrize("is_evaluated", [True, False])
    def test_parts_of_one_array_are_written(self, op, view, is_evaluated, kernel):
        caches = SEPARATE_VIEWS[view](memory(is_evaluated=is_evaluated))
        want = WRITERS[op](*map(mx.contiguous, caches))
        mx.eval(want)
        got = WRITERS[op](*caches)
        assert all(map(mx.array_equal, got, want))

    @pytest.mark.parametrize("argument", ["k_cache", "v_cache"])
    def test_broadcast_views_are_refused_at_once(self, op, argument):
        broadcast = mx.broadcast_to(memory(1, NUM_BLOCKS, BLOCK_SIZE, DIM), memory().shape)
        mx.eval(broadcast)
        caches = (broadcast, memory()) if argument == "k_cache" else (memory(), broadcast)
        with pytest.raises(ValueError, match=rf"^\[{op}\] {argument} .* broadcast view along axis"):
            WRITERS[op](*caches)

    def test_empty_pools_share_nothing(self, op, kernel):
        pool = memory()
        mx.eval(WRITERS[op](pool[:, :0], pool[:, :0]))
