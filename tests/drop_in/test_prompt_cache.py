"""A prompt cache of pages does what mlx-lm's does, and its copies are block tables."""

import copy
import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import cache as stock
from mlx_lm.models.base import create_causal_mask

from mlx_paged.attention.causal import FULL, causal
from mlx_paged.attention.forward import path_counts
from mlx_paged.attention.sdpa_hook import CausalMask, mlx_attention
from mlx_paged.drop_in.base_cache import StepView
from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.drop_in.kv_caches import KVCache, PagedKVCache, RotatingKVCache
from mlx_paged.runner.model_probe import leaves
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
)
from tests.support.models.architectures import ARCHITECTURES, NOT_ON_A_CPU, build
from tests.support.models.tiny_models import solo_greedy, tiny_model

pytestmark = pytest.mark.usefixtures("patched")


KERNEL_MODELS = ("llama", "qwen3", "gemma3_text", "gpt_oss", "jamba", "deepseek_v3")
GATHER_MODELS = ("gemma2",)


@pytest.mark.sampled(21)
@pytest.mark.parametrize("prefill_step_size", [2048, 13, 1])
@pytest.mark.parametrize("model_type", KERNEL_MODELS + GATHER_MODELS)
def test_generation_is_that_of_stock_caches(model_type, prefill_step_size):
    model = tiny_model(model_type)
    expected = greedy(model, PROMPT, stock_make_prompt_cache(model), 12)
    cache = make_prompt_cache(model, block_size=BLOCK)
    path_counts.clear()
    steps = generate_step(
        mx.array(PROMPT),
        model,
        max_tokens=12,
        prompt_cache=cache,
        prefill_step_size=prefill_step_size,
    )
    assert [int(token) for token, _ in steps] == expected
    assert bool(path_counts) == (model_type in KERNEL_MODELS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_without_the_hook_the_caches_work_through_gathered_arrays(model_type, monkeypatch):
    model = tiny_model(model_type)
    expected = greedy(model, PROMPT, stock_make_prompt_cache(model), 12)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", mlx_attention)
    path_counts.clear()
    assert greedy(model, PROMPT, make_prompt_cache(model, block_size=BLOCK), 12) == expected
    assert not path_counts


@pytest.mark.slow
@pytest.mark.parametrize("draft_seed", [0, 1], ids=["all accepted", "all rejected"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3"])
def test_speculative_decoding_gives_the_greedy_tokens(model_type, draft_seed):
    changes = {"sliding_window": 128} if model_type == "gemma3_text" else {}
    model = tiny_model(model_type, **changes)
    draft = tiny_model(model_type, seed=draft_seed, **changes)
    steps = speculative_generate_step(
        mx.array(PROMPT), model, draft, num_draft_tokens=3, max_tokens=20
    )
    assert [int(token) for token, *_ in steps] == solo_greedy(model, PROMPT, 20)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 3, 17], ids=["whole", "in a block", "over blocks"])
def test_forks_diverge_and_copy_one_block_each(llama, cut):
    """Deep copies of a cache go their own ways; the original is not touched."""
    cache = filled(llama)
    pool, before = pool_of(cache), contents(cache)
    forks = [copy.deepcopy(cache) for _ in range(3)]
    assert blocks_in_use(pool) == -(-len(PROMPT) // BLOCK)
    for i, fork in enumerate(forks):
        assert stock.trim_prompt_cache(fork, cut) == cut
        expected = stock_filled(llama, PROMPT[: len(PROMPT) - cut])
        assert greedy(llama, [i, i + 1], fork, 9) == greedy(llama, [i, i + 1], expected, 9)
    assert pool.allocator.store.cow_clones <= 3
    assert same(contents(cache), before)
    assert greedy(llama, [7], cache) == greedy(llama, [7], stock_filled(llama))
    check_integrity(pool)


def test_deep_copies_of_the_layers_one_by_one_are_one_fork_each(llama):
    cache = filled(llama)
    twin = [copy.deepcopy(c) for c in cache]
    assert greedy(llama, [3, 4], twin, 9) == greedy(llama, [3, 4], stock_filled(llama), 9)
    assert same(contents(cache), contents(stock_filled(llama)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stored", "asked", "left"),
    [(41, 41, 0), (30, 41, 11), (41, 30, 1)],
    ids=["exact", "shorter", "longer"],
)
def test_the_prompt_cache_of_the_server_reuses_pages(llama, stored, asked, left):
    lru = stock.LRUPromptCache()
    cache = filled(llama, PROMPT[:stored])
    pool = pool_of(cache)
    lru.insert_cache("m", PROMPT[:stored], cache)
    del cache
    found, rest = lru.fetch_nearest_cache("m", PROMPT[:asked])
    assert len(rest) == left
    assert blocks_in_use(pool) == -(-stored // BLOCK)
    expected = greedy(llama, [*PROMPT[:asked], 5], stock_make_prompt_cache(llama))
    assert greedy(llama, [*rest, 5], found) == expected
    assert pool.allocator.store.cow_clones <= 1
    again, _ = lru.fetch_nearest_cache("m", PROMPT[:stored])
    assert same(contents(again), contents(stock_filled(llama, PROMPT[:stored])))
    lru.trim_to(n_sequences=0)
    del found, again
    assert blocks_in_use(pool) == 0


def test_a_state_keeps_what_it_showed(llama):
    cache = filled(llama)
    states = [c.state for c in cache]
    stock.trim_prompt_cache(cache, 30)
    llama(mx.array([[9] * 25]), cache=cache)
    mx.eval([c.state for c in cache])
    for c, state in zip(cache, states, strict=True):
        c.state = state
    assert same(contents(cache), contents(stock_filled(llama)))
    del states
    assert blocks_in_use(pool_of(cache)) == -(-len(PROMPT) // BLOCK)


def test_a_state_may_be_given_to_another_layer_or_pool(llama):
    cache, other = filled(llama), make_prompt_cache(llama, block_size=2)
    for c, o in zip(cache, other, strict=True):
        o.state = c.state
    assert same(contents(other), contents(cache))
    assert len({id(o.rows[0]) for o in other}) == 1
    cache[1].state = cache[0].state
    assert same(contents(cache[1:2]), contents(cache[0:1]))


def test_trimmed_tokens_are_not_shown(llama):
    cache = filled(llama)
    stock.trim_prompt_cache(cache, 5)
    assert same(contents(cache), contents(stock_filled(llama, PROMPT[:-5])))


def test_a_state_shows_scattered_blocks_in_order(llama):
    caches = [make_prompt_cache(llama, block_size=BLOCK) for _ in range(2)]
    for start in range(0, 40, 8):
        for cache in caches:
            llama(mx.array([PROMPT[start : start + 8]]), cache=cache)
    other = make_prompt_cache(llama, block_size=2)
    for o, c in zip(other, caches[0], strict=True):
        o.state = c.state
    assert same(contents(other), contents(stock_filled(llama, PROMPT[:40])))


def test_evaluating_a_state_copies_nothing(llama):
    cache = filled(llama, PROMPT * 20)
    mx.eval([c.state for c in cache])
    before = mx.get_active_memory()
    mx.eval([c.state for c in cache])
    assert mx.get_active_memory() - before < cache[0].nbytes // 10
    assert pool_of(cache).allocator.store.cow_clones == 0


def test_shared_blocks_count_in_proportion(llama):
    cache = filled(llama)
    nbytes = -(-len(PROMPT) // BLOCK) * BLOCK * 2 * 2 * 16 * 4
    assert {c.nbytes for c in cache} == {nbytes}
    forks = [copy.deepcopy(cache) for _ in range(3)]
    assert {c.nbytes for c in (*cache, *forks[0])} == {nbytes // 4}
    batch = merged(forks)
    del cache, forks
    assert {c.nbytes for c in batch} == {nbytes}


def test_quantization_makes_mlx_lms_own_quantized_cache():
    model = tiny_model("qwen3")
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20, "max_tokens": 12}
    options["prefill_step_size"] = 16

    def run(cache) -> list[int]:
        steps = generate_step(mx.array(PROMPT), model, prompt_cache=cache, **options)
        return [int(token) for token, _ in steps]

    cache = make_prompt_cache(model, block_size=BLOCK)
    assert run(cache) == run(stock_make_prompt_cache(model))
    assert {type(c) for c in cache} == {stock.QuantizedKVCache}
    assert make_prompt_cache(model)[0].to_quantized(32, 4).empty()


def test_a_window_layer_is_not_quantized():
    with pytest.raises(NotImplementedError, match="RotatingKVCache Quantization"):
        filled(tiny_model("gemma3_text"))[0].to_quantized()


@pytest.mark.parametrize(
    ("model_type", "options", "kinds"),
    [
        ("llama", {}, {"KVCache"}),
        ("qwen3", {"max_kv_size": 64}, {"RotatingKVCache"}),
        ("gemma3_text", {"max_kv_size": 64}, {"KVCache", "RotatingKVCache"}),
        ("jamba", {}, {"KVCache", "ArraysCache"}),
        ("llama4_text", {}, {"KVCache"}),
        ("mamba2", {}, {"ArraysCache"}),
        ("afm7", {}, {"KVCache"}),
    ],
)
def test_layers_are_paged_where_that_is_right(model_type, options, kinds):
    assert {type(c).__name__ for c in make_prompt_cache(tiny_model(model_type), **options)} == kinds


PAGED = KVCache, RotatingKVCache


@pytest.mark.slow
def test_the_document_names_the_models_that_keep_mlx_lms_caches():
    text = (Path(__file__).parents[2] / "docs/drop-in.md").read_text()
    named = re.search(r"The models (.+?)\s+keep all of\s+mlx-lm's caches", text, re.DOTALL)
    stateful = re.search(r"Nothing is paged in (.+?), which have only states", text, re.DOTALL)
    kinds = {
        name: {type(c) for c in leaves(make_prompt_cache(build(name)))}
        for name in ARCHITECTURES.keys() - NOT_ON_A_CPU.keys()
    }
    unpaged = {name for name, classes in kinds.items() if classes.isdisjoint(PAGED)}
    states_only = {name for name in unpaged if kinds[name] == {stock.ArraysCache}}
    assert set(re.findall(r"\w+", named[1])) - {"and"} == unpaged - states_only
    assert set(re.findall(r"\w+", stateful[1])) - {"and"} == states_only
    others = set.union(*(kinds[name] for name in kinds.keys() - unpaged))
    assert others == {*PAGED, stock.ArraysCache, stock.ChunkedKVCache}


def test_lists_of_caches_are_taken_apart():
    class Lists:
        def make_cache(self):
            return [stock.CacheList(stock.KVCache(), stock.ArraysCache(2)), stock.KVCache()]

    first, second = make_prompt_cache(Lists())
    assert isinstance(first, stock.CacheList) and isinstance(first[1], stock.ArraysCache)
    assert (first[0].layer.index, second.layer.index) == (0, 1)
    assert first[0].rows == second.rows


def test_rows_of_equal_length_may_share_a_cache(llama):
    tokens = mx.array([PROMPT[:20], PROMPT[20:40]])
    caches = make_prompt_cache(llama, block_size=BLOCK), stock_make_prompt_cache(llama)
    for part in (tokens[:, :15], tokens[:, 15:16], tokens[:, 16:]):
        a, b = (llama(part, cache=cache) for cache in caches)
        assert mx.allclose(a, b, atol=1e-4)
    assert blocks_in_use(pool_of(caches[0])) == 10


def test_a_pipeline_may_make_keys_depend_on_other_work(llama):
    cache = filled(llama)
    before = contents(cache)
    cache[-1].keys = mx.depends(cache[-1].keys, mx.ones(3))
    cache[-1].values = mx.depends(cache[-1].values, mx.ones(3))
    assert same(contents(cache), before)


def test_types_are_cast_to_that_of_the_first_keys(llama):
    cache = filled(llama)[0]
    cache.update_and_fetch(*[mx.ones((1, 2, 1, 16), mx.bfloat16)] * 2)
    assert cache.keys_and_values()[0].dtype == mx.float32


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda c: c.update_and_fetch(mx.ones((2, 2, 1, 16)), mx.ones((2, 2, 1, 16))), "2 rows"),
        (lambda c: c.update_and_fetch(mx.ones((1, 3, 1, 16)), mx.ones((1, 3, 1, 16))), r"\(3, 16"),
        (
            lambda c: c.update_and_fetch(
                mx.ones((1, 2, 1, 16)), mx.ones((1, 2, 1, 16), mx.bfloat16)
            ),
            "keys are .*float32 but values",
        ),
        (
            lambda c: PagedKVCache.merge([c, stock.QuantizedKVCache()]),
            "a cache is a QuantizedKVCache with window None: expected K/V that",
        ),
    ],
    ids=["rows", "heads", "types", "merge"],
)
def test_mistakes_name_the_argument(llama, mistake, message):
    cache = filled(llama)
    with pytest.raises(ValueError, match=message):
        mistake(cache[0])
    assert same(contents(cache), contents(stock_filled(llama)))


@pytest.mark.parametrize("window", [None, 5])
def test_layers_may_attend_to_what_another_layer_wrote(llama, window):
    """The handles of a cache answer without a forward of its own, and know its window."""
    full = filled(llama)[0]
    cache = PagedKVCache.of(full.layer, full.rows, full.starts, window)
    keys, values = map(mx.array, cache.keys_and_values())
    q = mx.random.normal((1, 4, 1, 16), key=mx.random.key(0))
    attend = mx.fast.scaled_dot_product_attention
    seen = mx.arange(len(PROMPT)) >= len(PROMPT) - (window or len(PROMPT))
    expected = mlx_attention(q, keys, values, scale=0.2, mask=seen)
    full.trim(1)
    full.update_and_fetch(keys[:, :, -1:], values[:, :, -1:])
    latest = StepView(full.layer, full.rows[0].step, causal(window))
    for mask in (None, "causal", CausalMask.of(seen, sees=FULL)):
        out = attend(q, *latest.keys_and_values(), scale=0.2, mask=mask)
        assert mx.allclose(out, expected, atol=1e-5)
    for mask in (None, seen):
        assert mx.allclose(attend(q, *cache.keys_and_values(), scale=0.2, mask=mask), expected)
    many = mx.random.normal((1, 4, 9, 16), key=mx.random.key(1))
    mask = create_causal_mask(9, len(PROMPT) - 9, window_size=window)
    expected = mlx_attention(many, keys, values, scale=0.2, mask=mask)
    assert mx.allclose(attend(many, *cache.keys_and_values(), scale=0.2), expected, atol=1e-5)


def test_an_empty_cache_has_nothing_to_give(llama):
    cache = make_prompt_cache(llama)[0]
    assert cache.empty() and cache.offset == cache.size() == cache.nbytes == 0
    assert cache.keys is None and cache.values is None and not hasattr(cache, "bits")
    with pytest.raises(ValueError, match="empty"):
        cache.keys_and_values()
