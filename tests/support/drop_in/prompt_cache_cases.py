"""Prompt caches, paged and stock, and what is in them."""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from mlx_paged import ops
from mlx_paged.drop_in import caches
from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.kv.pool import KVPool
from tests.support.models.tiny_models import VOCAB

PROMPT = np.random.default_rng(0).integers(0, VOCAB, 41).tolist()
BLOCK = 4


def stock_make_prompt_cache(model) -> list:
    """mlx-lm's own caches, also under the patch, which rebinds the names of test modules."""
    return caches.unpaged_prompt_cache(model)


def greedy(model, tokens, cache, num_tokens: int = 6) -> list[int]:
    steps = generate_step(mx.array(tokens), model, max_tokens=num_tokens, prompt_cache=cache)
    return [int(token) for token, _ in steps]


def filled(model, tokens=PROMPT, **options) -> list:
    """A cache with the K/V of `tokens`."""
    cache = make_prompt_cache(model, **({"block_size": BLOCK} | options))
    model(mx.array([tokens]), cache=cache)
    mx.eval([c.state for c in cache])
    return cache


def stock_filled(model, tokens=PROMPT) -> list:
    cache = stock_make_prompt_cache(model)
    model(mx.array([tokens]), cache=cache)
    return cache


def as_stock(cache):
    """What a pickle of a paged cache has: mlx-lm's own cache, with a lazy copy of the K/V."""
    make, arguments, attributes = cache.__reduce_ex__(2)
    made = make(*arguments)
    made.__dict__.update(attributes)
    return made


def pool_of(cache):
    return cache[0].layer.pool


def contents(cache) -> list[np.ndarray]:
    return [np.array(mx.array(x)) for c in cache for x in c.keys_and_values()]


def same(a, b) -> bool:
    return all(np.allclose(x, y, atol=1e-5) for x, y in zip(a, b, strict=True))


def merged(caches) -> list:
    """Prompt caches, each a list of layers, as the layers of a batch."""
    return [type(column[0]).merge(column) for column in zip(*caches, strict=True)]


def blocks_in_use(pool) -> int:
    """Blocks that living sequences hold."""
    pool.release_dropped()
    return pool.allocator.store.blocks_in_use


def check_integrity(pool) -> None:
    """Assert that every block is free or held and that nothing leaks."""
    pool.release_dropped()
    pool.allocator.check_integrity()


def tokens_written(monkeypatch: Any) -> list[int]:
    """How many tokens each write of a layer's K/V stores from now on."""
    written: list[int] = []
    write, append = KVPool.write, ops.append_kv

    def counting_write(pool: KVPool, layer: int, k: Any, v: Any, slots: mx.array) -> None:
        written.append(int((slots >= 0).sum()))
        write(pool, layer, k, v, slots)

    def counting_append(*given: Any) -> Any:
        found, forward = append(*given), given[-2]
        written.extend([] if found is None else [int((forward.slot_mapping >= 0).sum())])
        return found

    monkeypatch.setattr(KVPool, "write", counting_write)
    monkeypatch.setattr(ops, "append_kv", counting_append)
    return written
