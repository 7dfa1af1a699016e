"""The pool behind the caches grows, refuses, and gives everything back."""

import copy
import gc
import threading
import weakref

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as stock

from mlx_paged import OutOfBlocksError
from mlx_paged.drop_in import shared_pool
from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.drop_in.kv_caches import PagedKVCache
from mlx_paged.drop_in.patch import patched_mlx_lm
from mlx_paged.drop_in.pool_layer import layer_of
from mlx_paged.drop_in.shared_pool import SharedPool
from tests.support.drop_in.prompt_cache_cases import (
    BLOCK,
    PROMPT,
    blocks_in_use,
    check_integrity,
    contents,
    filled,
    greedy,
    merged,
    pool_of,
    same,
    stock_filled,
    stock_make_prompt_cache,
    tokens_written,
)
from tests.support.models.tiny_models import solo_greedy

pytestmark = pytest.mark.usefixtures("patched")


def test_rejected_drafts_give_their_blocks_back(llama):
    cache = filled(llama)
    for _ in range(3):
        llama(mx.array([[1] * 30]), cache=cache)
        stock.trim_prompt_cache(cache, 30)
    llama(mx.array([[1]]), cache=cache)
    assert blocks_in_use(pool_of(cache)) == -(-(len(PROMPT) + 1) // BLOCK)
    check_integrity(pool_of(cache))


def test_layers_that_are_not_rewound_keep_their_tokens(llama):
    cache, expected = filled(llama), stock_filled(llama)
    for c in (cache, expected):
        c[0].trim(20)
        keys = mx.ones((1, 2, 2, 16))
        c[0].update_and_fetch(keys, keys)
    other = filled(llama, PROMPT[::-1])
    assert pool_of(other) is pool_of(cache)
    assert same(contents(cache), contents(expected))


def test_blocks_and_memory_go_with_the_last_cache_object(llama):
    gc.disable()
    try:
        cache = filled(llama)
        pool, layer = weakref.ref(pool_of(cache)), weakref.ref(cache[0].layer)
        fork = copy.deepcopy(cache)
        del cache
        assert blocks_in_use(pool()) == -(-len(PROMPT) // BLOCK)
        del fork
        assert pool() is None and layer() is None
    finally:
        gc.enable()


def test_a_growing_pool_keeps_what_is_in_it(llama):
    cache = make_prompt_cache(llama, block_size=1)
    expected = stock_make_prompt_cache(llama)
    for start in range(0, 350, 50):
        tokens = mx.array([(PROMPT * 10)[start : start + 50]])
        llama(tokens, cache=cache)
        llama(tokens, cache=expected)
    assert pool_of(cache).allocator.num_blocks == 390
    assert same(contents(cache), contents(expected))


def test_growing_holds_nothing_twice():
    before = mx.get_active_memory()
    layer = layer_of(SharedPool(1, BLOCK), 0)
    cache = PagedKVCache.of(layer, [layer.pool.new_sequence()], [0])
    for _ in range(3):
        keys = mx.zeros((1, 2, 1000, 16))
        cache.update_and_fetch(keys, keys)
        mx.eval(cache.state)
        del keys
    assert mx.get_active_memory() - before < 1.1 * layer.pool.nbytes


def test_growing_holds_one_array_twice_at_most():
    layer = layer_of(SharedPool(1, BLOCK), 0)
    cache = PagedKVCache.of(layer, [layer.pool.new_sequence()], [0])
    keys = mx.zeros((1, 2, 4000, 16))
    cache.update_and_fetch(keys, keys)
    mx.eval(cache.state)
    before = layer.pool.nbytes
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    layer.pool.allocator.grow(2 * layer.pool.allocator.num_blocks)
    assert layer.pool.nbytes == 2 * before
    assert mx.get_peak_memory() - active < 1.1 * (before + before // 2)


def test_a_pool_does_not_outgrow_the_device(llama, monkeypatch):
    cache = filled(llama)
    monkeypatch.setattr("mlx_paged.drop_in.shared_pool.spare_memory", lambda: 0)
    with pytest.raises(OutOfBlocksError, match="the device has no memory left: expected fewer"):
        llama(mx.array([[1] * 103]), cache=cache)


def test_blocks_that_there_are_count_as_available_where_memory_has_none(monkeypatch):
    layer = layer_of(SharedPool(3, BLOCK), 0)
    cache = PagedKVCache.of(layer, [layer.pool.new_sequence()], [0])
    cache.update_and_fetch(*[mx.zeros((1, 2, 41, 16))] * 2)
    monkeypatch.setattr("mlx_paged.drop_in.shared_pool.spare_memory", lambda: 0)
    with pytest.raises(OutOfBlocksError, match="25 KV blocks needed, 6 available"):
        cache.update_and_fetch(*[mx.zeros((1, 2, 100, 16))] * 2)


def test_a_full_pool_says_how_many_blocks_are_missing(llama):
    block_bytes = 3 * BLOCK * 2 * 2 * 16 * 4
    cache = filled(llama, PROMPT, kv_memory=20 * block_bytes)
    with pytest.raises(OutOfBlocksError, match=r"9 available of 4 tokens: kv_memory is .* GB"):
        llama(mx.array([[1] * 64]), cache=cache)
    pool = pool_of(cache)
    check_integrity(pool)
    assert cache[0].offset == len(PROMPT)
    assert greedy(llama, [7], cache) == greedy(llama, [7], stock_filled(llama))
    assert pool.nbytes <= 20 * block_bytes


def test_a_first_prompt_beyond_the_limit_is_refused(llama):
    with pytest.raises(OutOfBlocksError, match="11 KV blocks needed, 2 available"):
        filled(llama, PROMPT, kv_memory=2 * 3 * BLOCK * 2 * 2 * 16 * 4)


@pytest.mark.slow
def test_threads_that_share_a_model_do_not_share_a_pool(llama):
    expected = greedy(llama, PROMPT, stock_make_prompt_cache(llama), 20)
    results: list[list[int]] = []
    pools = []
    barrier = threading.Barrier(3)

    def work() -> None:
        cache = make_prompt_cache(llama, block_size=BLOCK)
        pools.append(pool_of(cache))
        barrier.wait(10)
        results.append(greedy(llama, PROMPT, cache, 20))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 3
    assert len(set(map(id, pools))) == 3


def test_a_cache_may_move_to_another_thread(llama):
    cache, results = filled(llama), []
    thread = threading.Thread(target=lambda: results.append(greedy(llama, [3], cache)))
    thread.start()
    thread.join()
    assert results == [greedy(llama, [3], stock_filled(llama))]


@pytest.mark.parametrize("option", ["block_size", "kv_memory"])
def test_options_below_one_are_refused(llama, option):
    with pytest.raises(ValueError, match=f"{option} is 0"):
        make_prompt_cache(llama, **{option: 0})


def test_no_forward_writes_more_than_its_tokens(llama, monkeypatch):
    """The pool is written once for each computed token: no operation rewrites K/V."""
    written = tokens_written(monkeypatch)
    steps = []
    new_step = SharedPool._new_step
    monkeypatch.setattr(SharedPool, "_new_step", lambda *args: steps.append(1) or new_step(*args))
    cache = filled(llama)
    fork = copy.deepcopy(cache)
    stock.trim_prompt_cache(fork, 5)
    greedy(llama, [1, 2, 3], fork, 4)
    assert sum(written) == 3 * (len(PROMPT) + 2 + 5)
    assert len(steps) == 1 + 1 + 5, "the layers of a forward share one step"


def test_a_model_never_gets_the_pool_of_one_that_had_its_address():
    class Model:
        pass

    model = Model()
    options = 1, (BLOCK, None, None, None)
    pool, address = shared_pool.pool_of(model, *options), id(model)
    assert shared_pool.pool_of(model, *options) is pool
    del model
    others = [Model() for _ in range(100)]
    reborn = [other for other in others if id(other) == address]
    assert all(shared_pool.pool_of(other, *options) is not pool for other in reborn)


def test_a_cache_of_another_pool_is_copied_once_for_all_layers(llama):
    small = make_prompt_cache(llama, block_size=2)
    llama(mx.array([PROMPT]), cache=small)
    here = make_prompt_cache(llama, block_size=BLOCK)
    batch = merged([here, small, small])
    pool = here[0].layer.pool
    assert all(c.layer.pool is pool for c in batch)
    assert blocks_in_use(pool) == 2 * -(-len(PROMPT) // BLOCK)
    for c, source in zip(batch, small, strict=True):
        k, _ = c.keys_and_values()
        assert mx.array_equal(mx.array(k[1:2]), mx.array(source.keys_and_values()[0]))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["merge", "state"])
def test_a_copy_is_not_overtaken_by_writes_to_its_source(llama, way):
    """Also if nobody has evaluated it by then."""
    source, here = filled(llama, block_size=2), make_prompt_cache(llama, block_size=BLOCK)
    expected, layers = contents(source), [c.layer for c in source]
    if way == "merge":
        here = merged([here, source])
    else:
        for layer in reversed(range(len(source))):
            here[layer].state = source.pop().state
    del source
    gc.collect()
    written = filled(llama, PROMPT[::-1], block_size=2)  # in the blocks of the one that is gone
    assert [c.layer for c in written] == layers
    assert way == "state" or layers[0].pool.allocator.num_blocks < 40  # a state holds its blocks
    assert same([x[-1:] for x in contents(here)], expected)


def test_a_fork_of_one_layer_is_not_anothers_after_a_write(llama):
    cache = filled(llama)
    kept = PagedKVCache.merge([cache[0]])
    llama(mx.array([[1] * 9]), cache=cache)
    assert same(contents([PagedKVCache.merge([cache[1]])]), contents([cache[1]]))
    assert kept.size() == len(PROMPT)


def test_a_fork_into_one_pool_is_not_for_another(llama):
    cache, there = filled(llama), make_prompt_cache(llama, block_size=2)
    kept = PagedKVCache.merge([there[0], cache[0]])
    here = PagedKVCache.merge([cache[1]])
    assert {row.pool for row in kept.rows} == {pool_of(there)}
    assert {row.pool for row in here.rows} == {pool_of(cache)}


def test_a_loaded_cache_joins_the_batch_of_the_model(llama, tmp_path):
    file = str(tmp_path / "cache.safetensors")
    head, tail = PROMPT[:30], PROMPT[30:]
    with patched_mlx_lm(block_size=BLOCK):
        cache = stock.make_prompt_cache(llama)
        llama(mx.array([head]), cache=cache)
        stock.save_prompt_cache(file, cache)
        del cache
        generator = BatchGenerator(llama, max_tokens=8)
        uids = generator.insert([tail, PROMPT[:5]], caches=[stock.load_prompt_cache(file), None])
        tokens = {uid: [] for uid in uids}
        while generated := generator.next_generated():
            for response in generated:
                tokens[response.uid].append(response.token)
    assert list(tokens.values()) == [solo_greedy(llama, p, 8) for p in (PROMPT, PROMPT[:5])]


def test_a_step_is_for_its_own_rows(llama):
    """Batches that share their first row and all positions write to rows of their own."""
    caches = [make_prompt_cache(llama, block_size=BLOCK) for _ in range(3)]
    batch, third = merged(caches[:2]), merged(caches[2:])
    keys = mx.ones((2, 2, 3, 16))
    for c in (*batch, *third):
        c.update_and_fetch(keys[: len(c.rows)], keys[: len(c.rows)])
    for c, more in zip(batch, third, strict=True):
        c.filter([0])
        c.extend(more)
        c.trim(3)
    for new in (2 * keys, 3 * keys):
        for c in batch:
            c.update_and_fetch(new, new)
    for c in batch:
        expected = mx.concatenate([2 * keys, 3 * keys], axis=2)
        assert mx.array_equal(mx.array(c.keys_and_values()[0]), expected)


def test_no_python_code_notes_the_collector():
    """Python prints and drops what such a callback raises, a KeyboardInterrupt too."""
    here = shared_pool.__file__
    codes = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    assert here not in {code.co_filename for code in codes if code}
    gc.collect()
    assert next(reversed(shared_pool._phases)) == "stop"
