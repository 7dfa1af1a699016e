"""New caches of a model whose K/V got another type or shape do not meet the old ones."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator

from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.drop_in.shared_pool import SharedPool
from tests.support.drop_in.prompt_cache_cases import (
    BLOCK,
    PROMPT,
    blocks_in_use,
    contents,
    filled,
    greedy,
    merged,
    pool_of,
    same,
    stock_filled,
    stock_make_prompt_cache,
)
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("patched")


def model_in(dtype: mx.Dtype, model_type: str = "llama"):
    model = tiny_model(model_type)
    model.set_dtype(dtype)
    return model


def types(cache) -> set[mx.Dtype]:
    return {array.dtype for c in cache for array in c.keys_and_values()}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_new_cache_has_the_models_new_type_and_the_old_one_keeps_its_own(model_type):
    model = model_in(mx.float16, model_type)
    old = filled(model)
    before = contents(old)
    model.set_dtype(mx.float32)
    new = make_prompt_cache(model, block_size=BLOCK)
    expected = greedy(model, PROMPT, stock_make_prompt_cache(model))
    assert greedy(model, PROMPT, new) == expected
    assert (types(old), types(new)) == ({mx.float16}, {mx.float32})
    num_pools = len({c.layer.pool for c in new})
    assert len({c.rows for c in new}) == num_pools, "the layers of a pool share a sequence"
    assert same(contents(old), before)


def test_an_old_cache_that_dies_takes_its_pool_along():
    """As in ``cache = make_prompt_cache(model)``, where the name had an old one."""
    model = model_in(mx.float16)
    cache = filled(model)
    pool = pool_of(cache)
    model.set_dtype(mx.float32)
    cache = make_prompt_cache(model, block_size=BLOCK)
    model(mx.array([PROMPT]), cache=cache)
    assert pool_of(cache) is not pool and pool.nbytes == 0
    assert same(contents(cache), contents(stock_filled(model)))


def test_caches_made_afterwards_share_the_new_pool():
    model = model_in(mx.float16)
    old = filled(model)
    model.set_dtype(mx.float32)
    first, second = (make_prompt_cache(model, block_size=BLOCK) for _ in range(2))
    for cache in (first, second):
        model(mx.array([PROMPT]), cache=cache)
    third = make_prompt_cache(model, block_size=BLOCK)
    assert pool_of(first) is pool_of(second) is pool_of(third) is not pool_of(old)
    old_pool, new_pool = pool_of(old), pool_of(first)
    del old, first, second, third, cache
    assert blocks_in_use(old_pool) == blocks_in_use(new_pool) == 0


def test_every_further_type_has_a_pool():
    model = tiny_model("llama")
    waiting = [make_prompt_cache(model, block_size=BLOCK) for _ in range(3)]
    for cache, dtype in zip(waiting, (mx.float16, mx.bfloat16, mx.float32), strict=True):
        model.set_dtype(dtype)
        model(mx.array([PROMPT]), cache=cache)
        assert types(cache) == {dtype}
    assert len({id(pool_of(cache)) for cache in waiting}) == 3
    assert same(contents(waiting[-1]), contents(stock_filled(model)))


def test_an_empty_batch_moves_with_all_its_rows():
    model = model_in(mx.float16)
    old = filled(model)
    batch = merged([make_prompt_cache(model, block_size=BLOCK) for _ in range(2)])
    model.set_dtype(mx.float32)
    for c in batch:
        c.prepare(lengths=[20, 13], right_padding=[0, 7])
    model(mx.array([PROMPT[:20], PROMPT[20:40]]), cache=batch)
    for c in batch:
        c.finalize()
    assert types(batch) == {mx.float32} and types(old) == {mx.float16}
    for i, prompt in enumerate((PROMPT[:20], PROMPT[20:33])):
        row = [c.extract(i) for c in batch]
        assert same(contents(row), contents(stock_filled(model, prompt)))


def test_requests_that_come_and_go_meet_in_one_new_pool(monkeypatch):
    model = model_in(mx.float16)
    old = filled(model)
    model.set_dtype(mx.float32)
    prompts = [PROMPT[:9], PROMPT[9:30], PROMPT[30:]]
    pools: list[SharedPool] = []
    init = SharedPool.__init__

    def noting_init(pool, *args, **kwargs) -> None:
        init(pool, *args, **kwargs)
        pools.append(pool)

    monkeypatch.setattr(SharedPool, "__init__", noting_init)
    generator = BatchGenerator(model, max_tokens=8, prefill_batch_size=1)
    tokens: dict[int, list[int]] = {uid: [] for uid in generator.insert(prompts)}
    while any(responses := generator.next()):
        for response in responses[1]:
            tokens[response.uid].append(response.token)
    assert len(pools) == 1 and types(old) == {mx.float16}
    for prompt, found in zip(prompts, tokens.values(), strict=True):
        assert found == greedy(model, prompt, stock_make_prompt_cache(model), 8)


def test_another_number_of_heads_takes_another_pool():
    model = tiny_model("llama")
    old = filled(model)[0]
    new = make_prompt_cache(model, block_size=BLOCK)[0]
    assert new.layer is old.layer
    keys = mx.random.normal((1, 3, 5, 8))
    new.update_and_fetch(keys, -keys)
    assert np.array_equal(*(np.array(mx.array(a)) for a in (keys, new.keys_and_values()[0])))
    assert same(contents([old]), contents(stock_filled(model)[:1]))
