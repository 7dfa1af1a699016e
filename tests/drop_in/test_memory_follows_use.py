"""The memory of the pools follows the blocks in use: it shrinks, grows without copies and ends."""

import copy
import gc
import itertools
import threading
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as stock

from mlx_paged import ops
from mlx_paged.attention.forward import path_counts
from mlx_paged.attention.sdpa_hook import attention_hook
from mlx_paged.drop_in.caches import PagedKVCache
from mlx_paged.drop_in.pool_layer import layer_of
from mlx_paged.drop_in.shared_pool import SharedPool
from mlx_paged.kv.allocator import BlockAllocator
from tests.support.drop_in.prompt_cache_cases import (
    PROMPT,
    as_stock,
    check_integrity,
    contents,
    filled,
    greedy,
    pool_of,
    same,
    stock_filled,
)

BLOCK, WINDOW, STEP = 4, 32, 16
HEADS_AND_DIMS = {"full": (2, 8, 8), "windowed": (2, 8, 8), "latent": (1, 16, 4)}


@pytest.fixture(params=["reserved", "plain"])
def memory(request, monkeypatch) -> str:
    """Arrays as on a CPU, and as on a GPU: without reserved address space."""
    if request.param == "plain":
        monkeypatch.setattr(ops, "pool_zeros", lambda shape, dtype, **_: mx.zeros(shape, dtype))
    return request.param


class Pair:
    """A prompt cache of two layers, and mlx-lm's own caches with the same history."""

    def __init__(self, pool: SharedPool, is_stock: bool) -> None:
        rows, window = [pool.new_sequence()], pool.window
        self.paged = [PagedKVCache.of(layer_of(pool, i), rows, [0], window) for i in range(2)]
        self.stock = [
            stock.RotatingKVCache(window) if window else stock.KVCache()
            for _ in range(2 * is_stock)
        ]

    def write(self, num_tokens: int, dims: tuple[int, int, int]) -> None:
        heads, *widths = dims
        for caches in zip(self.paged, *([self.stock] if self.stock else []), strict=True):
            kv = [mx.random.normal((1, heads, num_tokens, width)) for width in widths]
            for cache in caches:
                cache.update_and_fetch(*kv)

    def evaluate(self) -> None:
        mx.eval([c.layer.kv.handles() for c in self.paged], [c.state for c in self.stock])

    def trim(self, num_tokens: int) -> None:
        for caches in (self.paged, self.stock):
            if caches and stock.can_trim_prompt_cache(caches):
                stock.trim_prompt_cache(caches, num_tokens)

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.paged)

    def check(self) -> None:
        for paged, plain in zip(self.paged, self.stock, strict=True):
            assert paged.offset == plain.offset
            stored = [as_stock(paged), plain]
            found, expected = ([cache.keys, cache.values] for cache in stored)
            if isinstance(plain, stock.RotatingKVCache):
                expected = map(plain._temporal_order, expected)
            for x, y in zip(found, expected, strict=True):
                kept = y[..., : paged.offset, :][..., -paged.size() :, :]
                assert mx.array_equal(x, kept)


def check_all(pairs: list[Pair]) -> None:
    for pair in pairs:
        pair.check()


def held_bytes() -> int:
    mx.synchronize()
    return mx.get_active_memory() + ops.reserved_bytes()


def histories(
    kind: str, pool: SharedPool, num_requests: int, is_stock: bool = False
) -> Iterator[list[Pair]]:
    """Requests of random lengths on at most six kept caches: new, forked, trimmed and evicted."""
    random, kept = np.random.default_rng(3), list[Pair]()
    for _ in range(num_requests):
        longest = 400 if random.random() < 0.1 else 60
        if kept and random.random() < 0.6:
            pair = copy.deepcopy(kept[random.integers(len(kept))])
            pair.trim(int(random.integers(40)))
        else:
            pair = Pair(pool, is_stock)
        for num_tokens in (int(random.integers(1, longest)), 1):
            pair.write(num_tokens, HEADS_AND_DIMS[kind])
        pair.evaluate()
        kept.append(pair)
        del pair
        random.shuffle(kept)
        del kept[int(random.integers(1, 7)) :]
        yield kept


@pytest.fixture
def compactions(monkeypatch) -> list[int]:
    """The new sizes of the pools that shrank; each was then found in order."""
    sizes: list[int] = []
    compact = BlockAllocator.compact

    def checked(allocator: BlockAllocator, num_blocks: int):
        sizes.append(num_blocks)
        kept = compact(allocator, num_blocks)
        allocator.check_integrity()
        return kept

    monkeypatch.setattr(BlockAllocator, "compact", checked)
    return sizes


def new_pool(kind: str) -> SharedPool:
    return SharedPool(2, BLOCK, window=WINDOW if kind == "windowed" else None)


def test_attention_after_a_move_reads_where_the_blocks_are_now(compactions):
    pool, dims = new_pool("full"), (2, 64, 64)
    other, cache, plain = Pair(pool, False), Pair(pool, False).paged[0], stock.KVCache()
    other.write(400, dims)
    for num_tokens in (9, 1, 1):
        kv = [mx.random.normal((1, 2, num_tokens, 64)) for _ in range(2)]
        handles, expected = cache.update_and_fetch(*kv), plain.update_and_fetch(*kv)
        q = mx.random.normal((1, 4, num_tokens, 64))
        with attention_hook():
            mx.eval(mx.fast.scaled_dot_product_attention(q, *handles, scale=0.2, mask="causal"))
    path_counts.clear()
    other = Pair(pool, False)
    other.write(1, dims)
    assert compactions
    with attention_hook():
        out = mx.fast.scaled_dot_product_attention(q, *handles, scale=0.2)
    right = mx.fast.scaled_dot_product_attention(q, *expected, scale=0.2)
    assert path_counts == {"paged": 1}
    assert mx.allclose(out, right, atol=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", HEADS_AND_DIMS)
def test_memory_follows_use_over_a_thousand_requests(kind, memory, compactions):
    pool, before = new_pool(kind), held_bytes()
    for i, kept in enumerate(histories(kind, pool, 1000 if memory == "reserved" else 200)):
        block_bytes = pool.nbytes // pool.allocator.num_blocks
        live = pool.allocator.store.blocks_in_use * block_bytes
        assert pool.nbytes <= 1.5 * live + STEP * block_bytes
        if i % 20 == 0:
            assert abs(live - sum(pair.nbytes for pair in kept)) < 100
            assert held_bytes() - before < pool.nbytes + 100_000
    assert len(compactions) > 20
    kept.clear()
    assert pool.nbytes == 0
    assert held_bytes() - before < 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS_AND_DIMS)
def test_kept_caches_hold_what_mlx_lms_hold(kind, memory, compactions):
    for i, kept in enumerate(histories(kind, new_pool(kind), 100, is_stock=True)):
        if i % 10 == 9:
            check_all(kept)
    assert len(compactions) > 5


def address(array: mx.array) -> int:
    return np.array(array.transpose(1, 0, 2, 3), copy=False).ctypes.data


def test_growing_copies_nothing():
    layer = layer_of(SharedPool(1, BLOCK), 0)
    cache = PagedKVCache.of(layer, [layer.pool.new_sequence()], [0])
    keys = mx.random.normal((1, 2, 40, 16))
    cache.update_and_fetch(keys, 2 * keys)
    mx.eval(layer.kv.handles())
    if not ops.reserved_bytes():
        pytest.skip("this system reserves no address space")
    places, active = [address(x) for x in layer.arrays], mx.get_active_memory()
    mx.reset_peak_memory()
    layer.pool.allocator.grow(100_000)
    assert layer.pool.nbytes == 100_000 * BLOCK * 2 * 2 * 16 * 4
    assert [address(x) for x in layer.arrays] == places
    assert mx.get_peak_memory() - active < 10_000
    found = cache.keys_and_values()
    assert mx.array_equal(found[0], keys) and mx.array_equal(found[1], 2 * keys)
    cache.update_and_fetch(keys, keys)
    assert mx.array_equal(cache.keys_and_values()[0], mx.concatenate([keys, keys], axis=2))


@pytest.mark.slow
def test_an_idle_process_holds_nothing(llama):
    gc.collect()
    before = held_bytes()
    caches = [filled(llama, PROMPT * n) for n in (1, 20, 3)]
    assert held_bytes() - before > 100_000
    del caches
    assert held_bytes() - before < 1000


@pytest.mark.slow
def test_an_lru_prompt_cache_counts_what_the_pool_holds(llama):
    cache = stock.LRUPromptCache(max_size=3)
    prompts = [PROMPT[:20] + np.roll(PROMPT * 20, n).tolist() for n in range(4)]
    for prompt in prompts:
        held, rest = cache.fetch_nearest_cache("llama", prompt)
        held = held or filled(llama, prompt[:1])
        llama(mx.array([rest or prompt[-1:]]), cache=held)
        cache.insert_cache("llama", prompt, held)
        pool = pool_of(held)
    del held
    entries = [cache._trie.get(*key) for lru in cache._lru._lrus.values() for key in lru]
    assert len(entries) == 3
    live = sum(c.nbytes for entry in entries for c in entry.prompt_cache)
    block_bytes = pool.nbytes // pool.allocator.num_blocks
    assert abs(live - pool.allocator.store.blocks_in_use * block_bytes) < 100
    assert pool.nbytes <= 1.5 * live + STEP * block_bytes


@pytest.mark.slow
def test_what_was_read_before_the_pool_shrinks_stays(llama):
    long, cache = filled(llama, PROMPT * 10), filled(llama)
    pool, expected, handles = pool_of(cache), contents(cache), [c.keys_and_values() for c in cache]
    lazy = [2 * x for pair in handles for x in pair]
    num_blocks = pool.allocator.num_blocks
    del long
    assert pool.allocator.num_blocks < num_blocks / 2
    check_integrity(pool)
    assert same([np.array(x) for x in lazy], [2 * x for x in expected])
    assert same(contents(cache), expected)
    assert greedy(llama, [3], cache) == greedy(llama, [3], stock_filled(llama))


def test_a_state_keeps_its_content_and_its_pool_until_it_is_deleted(llama):
    long, cache = filled(llama, PROMPT * 10), filled(llama)
    pool, expected = pool_of(cache), contents(cache)
    state = [c.state for c in cache]
    num_blocks = pool.allocator.num_blocks
    del long
    for c, kept in zip(cache, state, strict=True):
        c.state = kept
    assert same(contents(cache), expected)
    assert pool.allocator.num_blocks == num_blocks
    del state, c, kept
    assert greedy(llama, [3], cache) == greedy(llama, [3], stock_filled(llama))
    assert pool.allocator.num_blocks < num_blocks / 2
    check_integrity(pool)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 40])
def test_a_pool_may_shrink_within_a_forward(llama, columns):
    """Between two layers, and between a layer's write and its attention."""
    expected = stock_filled(llama)
    tokens = mx.array([PROMPT[:columns]])
    logits = llama(tokens, cache=expected)
    for index in range(3):
        long, cache = [filled(llama, PROMPT * 10)], filled(llama)
        num_blocks = pool_of(cache).allocator.num_blocks
        write = cache[index].update_and_fetch

        def deleting(keys, values, write=write, long=long):
            handles = write(keys, values)
            long.clear()
            return handles

        cache[index].update_and_fetch = deleting
        with attention_hook():
            found = llama(tokens, cache=cache)
        assert pool_of(cache).allocator.num_blocks < num_blocks / 2
        assert mx.allclose(found, logits, atol=1e-5)
        del cache[index].update_and_fetch
        assert same(contents(cache), contents(expected))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("nth", range(1, 7))
def test_memory_that_runs_out_while_a_pool_shrinks_loses_nothing(llama, monkeypatch, nth):
    long, cache = [filled(llama, PROMPT * 10)], filled(llama)
    pool, expected = pool_of(cache), contents(cache)
    thread = threading.Thread(target=long.clear)  # leaves the work to this thread
    thread.start()
    thread.join()
    zeros, calls = ops.pool_zeros, itertools.count(1)

    def running_out(*args, **options):
        if next(calls) == nth:
            raise RuntimeError("[malloc] Unable to allocate")
        return zeros(*args, **options)

    monkeypatch.setattr(ops, "pool_zeros", running_out)
    with pytest.raises(RuntimeError, match="Unable to allocate"):
        pool.settle()
    assert same(contents(cache), expected)
    assert greedy(llama, [3], cache) == greedy(llama, [3], stock_filled(llama))
    assert {c.layer.kv.num_blocks for c in cache} == {pool.allocator.num_blocks}
    check_integrity(pool)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["collector", "thread"])
def test_a_deletion_at_any_moment_leaves_the_work_to_the_next_step(llama, way):
    long, cache = [filled(llama, PROMPT * 10)], filled(llama)
    pool, num_blocks = pool_of(cache), pool_of(cache).allocator.num_blocks
    if way == "thread":
        thread = threading.Thread(target=long.clear)
        thread.start()
        thread.join()
    else:
        long.append(long)
        del long
        gc.collect()
    assert pool.allocator.num_blocks == num_blocks
    assert greedy(llama, [3], cache) == greedy(llama, [3], stock_filled(llama))
    assert pool.allocator.num_blocks < num_blocks / 2


def test_no_pool_shrinks_within_a_gradient(llama):
    long, cache = [filled(llama, PROMPT * 10)], filled(llama)
    pool, num_blocks = pool_of(cache), pool_of(cache).allocator.num_blocks

    def loss(scale: mx.array) -> mx.array:
        long.clear()
        return (llama(mx.array([[3]]), cache=cache) * scale).sum()

    value, _ = mx.value_and_grad(loss)(mx.array(1.0))
    assert pool.allocator.num_blocks == num_blocks
    assert mx.allclose(value, llama(mx.array([[3]]), cache=stock_filled(llama)).sum(), atol=1e-3)
