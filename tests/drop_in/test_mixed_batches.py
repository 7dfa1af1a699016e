"""Stock and paged caches in one batch."""

from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as stock

from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.drop_in.kv_caches import BatchPagedKVCache
from mlx_paged.drop_in.patch import patched_mlx_lm
from tests.support.drop_in.prompt_cache_cases import (
    blocks_in_use,
    greedy,
    merged,
    stock_make_prompt_cache,
)
from tests.support.models.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.mac

PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (5, 40, 17)]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("kinds", ["SP", "PS", "SSP", "PSS"])
@pytest.mark.parametrize("way", ["merge", "extend"])
def test_stock_and_paged_caches_share_a_batch(model_type, kinds, way):
    """In any order; each row goes on as alone."""
    model = tiny_model(model_type)
    make = {"S": stock_make_prompt_cache, "P": make_prompt_cache}
    caches = [make[kind](model) for kind in kinds]
    for cache, prompt in zip(caches, PROMPTS, strict=False):
        model(mx.array([prompt]), cache=cache)
    if way == "merge":
        batch = merged(caches)
    else:
        batch = merged(caches[:1])
        for cache in caches[1:]:
            for layer, more in zip(batch, merged([cache]), strict=True):
                layer.extend(more)
    pools = {c.layer.pool for c in batch if isinstance(c, BatchPagedKVCache)}
    blocks = sum(-(-len(p) // 16) for p in PROMPTS[: len(kinds)])
    assert all(blocks_in_use(pool) <= 2 * blocks for pool in pools)
    with patched_mlx_lm():
        logits = model(mx.array([[7]] * len(kinds)), cache=batch)
    for row, prompt in zip(logits, PROMPTS, strict=False):
        assert mx.allclose(row, model(mx.array([[*prompt, 7]]))[0, -1:], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("is_patched_first", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_batch_that_runs_takes_caches_of_the_other_kind(model_type, is_patched_first):
    """The patch begins or ends while a batch generator runs."""
    model = tiny_model(model_type)
    generator = BatchGenerator(model, max_tokens=12)
    tokens: dict[int, list[int]] = {}

    def run(steps: int) -> None:
        for _ in range(steps):
            for response in generator.next()[1]:
                tokens.setdefault(response.uid, []).append(response.token)

    for i, prompt in enumerate(PROMPTS):
        with patched_mlx_lm() if is_patched_first == (i == 0) else nullcontext():
            generator.insert([prompt])
            run(4)
    with patched_mlx_lm():
        run(20)
    for prompt, (_, found) in zip(PROMPTS, sorted(tokens.items()), strict=True):
        assert found == greedy(model, prompt, stock_make_prompt_cache(model), 12)


def test_what_cannot_share_a_batch_is_named():
    paged, other = make_prompt_cache(tiny_model("llama"))[0], stock.RotatingKVCache(8, keep=4)
    other.update_and_fetch(*[mx.ones((1, 2, 3, 16))] * 2)
    for cache in (other, stock.QuantizedKVCache()):
        with pytest.raises(ValueError, match=f"merge. a cache is a {type(cache).__name__} with"):
            paged.merge([paged, cache])
        with pytest.raises(ValueError, match=r"\[extend\] a cache is a"):
            paged.merge([paged]).extend(cache)
