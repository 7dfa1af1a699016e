"""LRUPromptCache(max_bytes) under the patch: the limit binds for the blocks that entries hold."""

import copy
import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as stock

from mlx_paged.drop_in.base_cache import PagedCache
from mlx_paged.drop_in.patch import patched_mlx_lm
from mlx_paged.runner.model_probe import leaves
from tests.support.drop_in.prompt_cache_cases import blocks_in_use, filled
from tests.support.models.tiny_models import VOCAB, tiny_model

SHARED = [1 + i % 50 for i in range(120)]  # the common beginning of all prompts


@pytest.fixture(autouse=True)
def patched():
    with patched_mlx_lm():
        yield


def entries(lru: stock.LRUPromptCache) -> list:
    keys = [key for known in lru._lru._lrus.values() for key in known]
    return [lru._trie.get(*key).prompt_cache for key in keys]


def bytes_held(lru: stock.LRUPromptCache) -> int:
    """Of the blocks in use by all pools of the entries, and of mlx-lm's own caches. Nobody else
    may hold blocks of these pools."""
    gc.collect()
    all_of = [cache for entry in entries(lru) for cache in leaves(entry)]
    layers = {cache.layer for cache in all_of if isinstance(cache, PagedCache)}
    unpaged = sum(cache.nbytes for cache in all_of if not isinstance(cache, PagedCache))
    return unpaged + sum(blocks_in_use(layer.pool) * layer.kv.block_bytes for layer in layers)


def extended(model, cache: list, tokens: list[int]) -> list:
    model(mx.array([tokens]), cache=cache)
    mx.eval([c.state for c in cache])
    return cache


CASES = [("llama", 0), ("llama", 1), ("gemma3_text", 2), ("jamba", 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_the_limit_binds_in_any_order(name, seed):
    model = tiny_model(name)
    rng = np.random.default_rng(seed)
    one = sum(c.nbytes for c in filled(model, SHARED))
    limit = int(one * rng.uniform(1.6, 2.6))
    lru = stock.LRUPromptCache(max_size=40, max_bytes=limit)
    live, most = [], 0  # requests under way: they share blocks with entries, and end at any time
    for _ in range(20):
        tokens = SHARED[: rng.integers(60, 120)] + rng.integers(VOCAB, size=9).tolist()
        cache, rest = lru.fetch_nearest_cache("m", tokens)
        if cache is None or rng.random() < 0.1:
            cache, rest = filled(model, tokens[:5]), tokens[5:]
        cache = extended(model, cache, rest or tokens[-1:])
        live += [copy.deepcopy(cache) for _ in range(rng.integers(3))]
        kind = str(rng.choice(["assistant", "user", "system"]))
        lru.insert_cache("m", tokens, cache, cache_type=kind)
        if rng.random() < 0.2:
            lru.trim_to(n_sequences=int(rng.integers(1, 6)))
        if rng.random() < 0.2:
            lru.trim_to(n_bytes=int(limit * rng.random()))
        del cache
        if rng.random() < 0.5:
            live.clear()
            held = bytes_held(lru)
            assert held <= lru.nbytes <= held + len(lru)
            assert held <= limit
            sizes = [stats["n_bytes"] for stats in lru.stats_by_type().values()]
            assert sum(sizes) == lru.nbytes
            most = max(most, len(lru))
    assert most > 1  # the limit is not too strict either


@pytest.mark.slow
def test_entries_that_share_their_blocks_fit_together():
    model = tiny_model("llama")
    trunk = filled(model, SHARED)
    one = sum(c.nbytes for c in trunk)
    lru = stock.LRUPromptCache(max_size=40, max_bytes=one * 2)
    forks = [copy.deepcopy(trunk) for _ in range(16)]
    del trunk
    for number, fork in enumerate(forks):
        lru.insert_cache("m", [*SHARED, number], extended(model, fork, [number]))
    assert len(lru) == 16
    del forks, fork
    assert one < bytes_held(lru) <= lru.nbytes < one * 2


@pytest.mark.slow
def test_an_entry_counts_whole_when_its_sharers_have_gone():
    model = tiny_model("llama")
    trunk = filled(model, SHARED)
    one = sum(c.nbytes for c in trunk)
    lru = stock.LRUPromptCache(max_bytes=one * 2)
    live = [copy.deepcopy(trunk) for _ in range(15)]
    lru.insert_cache("m", SHARED, trunk)
    assert lru.nbytes == one
    del live, trunk
    assert bytes_held(lru) == one
