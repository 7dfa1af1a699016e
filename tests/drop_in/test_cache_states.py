"""States and rows of paged caches are not to be had by two caches at once."""

import mlx.core as mx
import pytest

from mlx_paged import OutOfBlocksError
from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.drop_in.kv_caches import BatchPagedKVCache, PagedKVCache
from mlx_paged.drop_in.pool_layer import layer_of
from mlx_paged.drop_in.shared_pool import SharedPool
from tests.support.drop_in.prompt_cache_cases import (
    BLOCK,
    PROMPT,
    check_integrity,
    contents,
    filled,
    merged,
    pool_of,
    same,
    stock_filled,
)
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("patched")


def kv(tokens: int, value: float, rows: int = 1) -> list[mx.array]:
    return [mx.full((rows, 2, tokens, 16), value)] * 2


def batch_of(rows: int, layers: int = 2) -> list[BatchPagedKVCache]:
    """An empty batch in a pool of its own."""
    pool = SharedPool(layers, BLOCK)
    sequences = [pool.new_sequence() for _ in range(rows)]
    return [BatchPagedKVCache.of(layer_of(pool, i), sequences, [0] * rows) for i in range(layers)]


def keys_of(cache) -> mx.array:
    return mx.array(cache.keys_and_values()[0])


def test_caches_that_take_the_same_state_go_their_own_ways(llama):
    cache, twin = filled(llama), make_prompt_cache(llama, block_size=BLOCK)
    states = [c.state for c in cache]
    for tokens in ([9, 8, 7, 6], [3, 4, 5]):
        for c, t, state in zip(cache, twin, states, strict=True):
            c.state = state
            t.state = state
        llama(mx.array([tokens]), cache=cache)
        mx.eval([c.state for c in cache])
        assert same(contents(twin), contents(stock_filled(llama)))
        llama(mx.array([tokens[::-1]]), cache=twin)
        assert same(contents(cache), contents(stock_filled(llama, PROMPT + tokens)))


def test_a_state_of_one_layer_keeps_what_it_showed_though_forks_are_written(llama):
    cache = filled(llama, PROMPT[:-2])
    keys, _, _ = cache[0].state
    expected = keys + 0
    mx.eval(expected)
    forks = merged([cache])
    del cache
    for fork in forks[::-1]:
        fork.trim(9)
        fork.update_and_fetch(*kv(9, 7.0))
        mx.eval(fork.keys)
    assert mx.array_equal(keys, expected)


def test_layers_may_be_rewound_unequally(llama):
    cache, expected = filled(llama), stock_filled(llama)
    for c in (cache, expected):
        c[0].trim(30)
        c[1].trim(3)
        c[2].trim(3)
        c[0].update_and_fetch(*kv(2, 1.0))
    other = filled(llama, PROMPT[::-1])
    assert pool_of(other) is pool_of(cache)
    assert same(contents(cache), contents(expected))


def test_a_step_ends_where_one_of_its_rows_is_written_otherwise():
    """One layer wrote a row alone, whose old blocks went to another sequence."""
    batch = batch_of(2)
    for c in batch:
        c.update_and_fetch(*kv(2 * BLOCK, 1.0, rows=2))
        c.trim(2 * BLOCK)
    batch[0].filter([1])
    batch[0].update_and_fetch(*kv(1, 2.0))
    pool = batch[0].layer.pool
    sequence = pool.new_sequence()
    other = [PagedKVCache.of(layer_of(pool, i), [sequence], [0]) for i in range(2)]
    for c in other:
        c.update_and_fetch(*kv(BLOCK, 3.0))
    batch[1].update_and_fetch(*kv(2 * BLOCK, 4.0, rows=2))
    assert all((keys_of(c) == 3.0).all() for c in other)
    assert (keys_of(batch[1]) == 4.0).all()


def test_nothing_is_trimmed_where_nothing_is():
    (cache,) = batch_of(2, layers=1)
    cache.prepare(left_padding=[3, 0])
    cache.prepare(left_padding=[0, 1])
    assert cache.offset.tolist() == [-3, -1]
    assert cache.trim(2) == 0 and cache.offset.tolist() == [-3, -1]
    cache.update_and_fetch(*kv(5, 1.0, rows=2))
    assert cache.trim(-1) == 0 and cache.offset.tolist() == [2, 4]
    assert cache.trim(9) == 2 and cache.offset.tolist() == [0, 2]


def test_layers_of_a_forward_share_their_offsets():
    batch = batch_of(3)
    for c in batch:
        c.update_and_fetch(*kv(2, 1.0, rows=3))
    assert batch[0].offset is batch[1].offset


def test_an_empty_cache_in_a_pool_that_is_written_has_nothing_to_give(llama):
    filled(llama), make_prompt_cache(llama, block_size=BLOCK)
    cache = filled(llama)
    empty = make_prompt_cache(llama, block_size=BLOCK)
    assert pool_of(empty) is pool_of(cache)
    with pytest.raises(ValueError, match="empty"):
        empty[0].keys_and_values()
    mx.eval([c.state for c in empty])
    assert [c.nbytes for c in empty] == [0] * len(empty)


def test_a_batch_takes_no_rows_of_another_window():
    (batch,), (other,) = batch_of(1, layers=1), batch_of(1, layers=1)
    other.window = 7
    with pytest.raises(ValueError, match="window 7: expected K/V that a batch with window None"):
        batch.extend(other)


def test_a_full_pool_loses_no_copy_that_was_due():
    """The first row got a block of its own for its tail before the second one found none."""
    block_bytes = 2 * 2 * BLOCK * 16 * 4
    pool = SharedPool(1, BLOCK, kv_memory=8 * block_bytes)
    layer = layer_of(pool, 0)
    batch = BatchPagedKVCache.of(layer, [pool.new_sequence() for _ in range(2)], [0, 0])
    batch.prepare(lengths=[6, 1], right_padding=[0, 5])
    batch.update_and_fetch(*kv(6, 1.0, rows=2))
    batch.finalize()
    fork = batch.extract(0)
    with pytest.raises(OutOfBlocksError):
        batch.update_and_fetch(*kv(12, 2.0, rows=2))
    for cache in (batch.extract(0), fork):
        assert (keys_of(cache) == 1.0).all()
    check_integrity(pool)
    batch.update_and_fetch(*kv(1, 3.0, rows=2))
    assert keys_of(batch)[0, 0, :, 0].tolist() == [1.0] * 6 + [3.0]
    assert (keys_of(fork) == 1.0).all()


@pytest.mark.parametrize("left_padding", [0, 2])
def test_an_empty_row_joins_from_another_pool(llama, left_padding):
    cache, other = filled(llama), batch_of(1, layers=len(llama.layers))
    for c in other:
        c.prepare(left_padding=[left_padding])
    batch = merged([cache, other])
    assert batch[0].offset.tolist() == [len(PROMPT), -left_padding]
    assert same(contents([c.extract(0) for c in batch]), contents(stock_filled(llama)))


def test_a_cache_trimmed_to_nothing_keeps_empty_arrays_in_its_state():
    model = tiny_model("llama")
    caches = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=caches)
    cache = caches[0]
    assert cache.trim(3) == 3
    cache.state = cache.state
    assert cache.offset == 0 and cache.keys.shape[2] == cache.values.shape[2] == 0
    assert cache.keys.shape[1] == cache.state[0].shape[1] > 0
