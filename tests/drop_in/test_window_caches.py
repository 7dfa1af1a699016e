"""Layers with a window let go of what no query sees any more, as mlx-lm's rotating caches do."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models import cache as stock

from mlx_paged import OutOfBlocksError
from mlx_paged.attention.sdpa_hook import mlx_attention
from mlx_paged.drop_in.caches import as_paged, make_prompt_cache
from mlx_paged.kv.blocks import ceil_div
from tests.support.drop_in.prompt_cache_cases import (
    BLOCK,
    blocks_in_use,
    check_integrity,
    filled,
    greedy,
    merged,
    stock_filled,
    stock_make_prompt_cache,
)
from tests.support.models.architectures import VOCAB, build

pytestmark = pytest.mark.usefixtures("patched")


MODELS = ("gemma3", "gpt_oss", "cohere2", "exaone4", "gemma3n", "olmo3", "mimo_v2_flash")
WINDOW = 8
TEXT = np.random.default_rng(3).integers(0, VOCAB, 400).tolist()


def windowed(name: str = "gemma3", window: int = WINDOW, **changes):
    return build(name, sliding_window=window, sliding_window_size=window, **changes)


@pytest.fixture(scope="module")
def model():
    return windowed(num_hidden_layers=3)  # windows are the first layer and the last one


def window_layers(cache) -> list:
    return [c for c in cache if c.window]


def assert_small(cache, expected) -> None:
    """Each layer holds at most the blocks that mlx-lm's tokens fill, and one more."""
    for c, plain in zip(cache, expected, strict=True):
        held = min(plain.offset, plain.keys.shape[2])  # mlx-lm adds room for 256 tokens at a time
        assert c.offset == plain.offset and c.size() == plain.size()
        assert c.nbytes <= (ceil_div(held, BLOCK) + 1) * c.layer.kv.block_bytes
        assert c.is_trimmable() == plain.is_trimmable()


def assert_continues(model, cache, tokens, expected, num_tokens: int = 20) -> None:
    """The log-probabilities after `tokens` are those with the cache `expected`."""
    runs = [
        generate_step(mx.array(tokens), model, max_tokens=num_tokens, prompt_cache=c)
        for c in (cache, expected)
    ]
    for (token, found), (stock_token, wanted) in zip(*runs, strict=True):
        assert token == stock_token and mx.allclose(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("window", "prefill_step_size"), [(WINDOW, 7), (WINDOW, 2048), (64, 50), (64, 2048)]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_long_prompt_in_chunks_is_that_of_stock_caches(name, window, prefill_step_size):
    model = windowed(name, window)
    caches = make_prompt_cache(model, block_size=BLOCK), stock_make_prompt_cache(model)
    for start in range(0, 199, prefill_step_size):
        for cache in caches:
            model(mx.array([TEXT[start : min(199, start + prefill_step_size)]]), cache=cache)
        assert_small(*caches)
    assert_continues(model, caches[0], TEXT[199:200], caches[1], window + 10)
    assert_small(*caches)
    for c in window_layers(caches[0]):
        assert blocks_in_use(c.layer.pool) <= window // BLOCK + 1
        check_integrity(c.layer.pool)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_ragged_batches_join_and_leave(name):
    model = windowed(name)
    generator = BatchGenerator(model, prefill_step_size=16, completion_batch_size=4)
    prompts = [TEXT[i : i + n] for i, n in enumerate((5, 90, 17, 33, 1, 8, 61))]
    tokens: dict[int, list[int]] = {}
    for step in range(300):
        if step in (0, 5, 9):
            wave = {0: prompts[:3], 5: prompts[3:5], 9: prompts[5:]}[step]
            generator.insert(wave, [12 + len(prompt) % 7 for prompt in wave])
        prompting, generated = generator.next()
        for response in generated:
            tokens.setdefault(response.uid, []).append(response.token)
        if step > 9 and not prompting and not generated:
            break
    for prompt, (_, found) in zip(prompts, sorted(tokens.items()), strict=True):
        assert found == greedy(model, prompt, stock_make_prompt_cache(model), len(found))


@pytest.mark.slow
@pytest.mark.parametrize("before", [3, WINDOW - 1, WINDOW, 30])
def test_copies_go_on_alone(model, before):
    cache, plain = filled(model, TEXT[: before - 2]), stock_filled(model, TEXT[: before - 2])
    for caches in (cache, plain):
        mx.eval(model(mx.array([TEXT[before - 2 : before]]), cache=caches))
    twins = copy.deepcopy(cache), [c.extract(0) for c in merged([cache, cache])]
    for i, twin in enumerate(twins):
        assert_continues(model, twin, [i, 9], copy.deepcopy(plain))
    states = [c.state for c in cache]
    assert_continues(model, cache, [7], copy.deepcopy(plain))
    other = make_prompt_cache(model, block_size=3)
    for c, o, state in zip(cache, other, states, strict=True):
        c.state = o.state = state
    for restored in (cache, other, merged([make_prompt_cache(model, block_size=5), cache])):
        restored = [c.extract(1) if hasattr(c, "extract") else c for c in restored]
        assert_continues(model, restored, [8, 2], copy.deepcopy(plain))
    check_integrity(cache[0].layer.pool)


def test_a_batch_holds_no_more_than_its_rows(model):
    rows = [filled(model, TEXT[:n]) for n in (40, 3, 200)]
    batch = merged(rows)
    del rows
    for _ in range(2):
        model(mx.array([[5], [6], [7]]), cache=batch)
    for c in window_layers(batch):
        assert blocks_in_use(c.layer.pool) <= 3 * (WINDOW // BLOCK + 1)
        assert c.nbytes == blocks_in_use(c.layer.pool) * c.layer.kv.block_bytes
        assert copy.deepcopy(c).nbytes == c.nbytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_tokens", [WINDOW - 1, 23, 301])
def test_a_loaded_cache_brings_one_window(model, tmp_path, num_tokens):
    file = str(tmp_path / "cache.safetensors")
    stock.save_prompt_cache(file, filled(model, TEXT[:num_tokens]))
    loaded = stock.load_prompt_cache(file)
    cache = as_paged(model, loaded, block_size=BLOCK)
    assert_small(cache, loaded)
    for c in window_layers(cache):
        assert blocks_in_use(c.layer.pool) <= WINDOW // BLOCK + 1
    assert_continues(model, cache, [7, 1], stock_filled(model, TEXT[:num_tokens]))


@pytest.mark.parametrize("rows", [1, 2])
def test_rotated_caches_of_mlx_lm_are_taken_over(model, rows):
    given = stock_make_prompt_cache(model)
    for start in range(0, 30, 10):
        model(mx.array([TEXT[start : start + 10]] * rows), cache=given)
    cache = as_paged(model, given, block_size=BLOCK)
    for tokens in ([[4, 5, 6]] * rows, [[7]] * rows):
        a, b = (model(mx.array(tokens), cache=c) for c in (cache, given))
        assert mx.allclose(a, b, atol=1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("stored", "asked"), [(30, 30), (20, 30), (30, 20), (6, 4), (6, 30)], ids=str
)
def test_the_prompt_cache_of_the_server_finds_what_stock_caches_give(model, stored, asked):
    rests, found = [], []
    for filler in (filled, stock_filled):
        lru = stock.LRUPromptCache()
        lru.insert_cache("m", TEXT[:stored], filler(model, TEXT[:stored]))
        cache, rest = lru.fetch_nearest_cache("m", TEXT[:asked])
        found.append(cache)
        rests.append(rest)
    assert rests[0] == rests[1] and (found[0] is None) == (found[1] is None)
    if found[0] is not None:
        assert_continues(model, found[0], [*rests[0], 5], found[1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_tokens", [WINDOW - 1, WINDOW, 30])
def test_rewinding_is_refused_where_mlx_lm_refuses_it(model, num_tokens):
    caches = filled(model, TEXT[:num_tokens]), stock_filled(model, TEXT[:num_tokens])
    trimmed = [stock.trim_prompt_cache(cache, 2) for cache in caches]
    assert trimmed == [2 if num_tokens < WINDOW else 0] * 2
    if num_tokens >= WINDOW:
        with pytest.raises(ValueError, match=r"\[trim\] n is 2: expected 0 where"):
            caches[0][0].trim(2)
    assert_continues(model, caches[0], [3, 1], caches[1])


@pytest.mark.slow
@pytest.mark.parametrize("draft_seed", [0, 1], ids=["all accepted", "all rejected"])
def test_speculative_decoding_is_that_of_stock_caches(model, draft_seed):
    draft, tokens = windowed(num_hidden_layers=3, seed=draft_seed), []
    for make in (make_prompt_cache, stock_make_prompt_cache):
        cache = make(model) + make(draft)
        steps = speculative_generate_step(
            mx.array(TEXT[:5]), model, draft, num_draft_tokens=3, max_tokens=20, prompt_cache=cache
        )
        tokens.append([int(token) for token, *_ in steps])
    assert tokens[0] == tokens[1]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mimo_v2_flash"])
@pytest.mark.parametrize("is_hooked", [True, False])
def test_what_was_let_go_is_not_read(name, is_hooked, monkeypatch):
    model = windowed(name)
    cache, plain = make_prompt_cache(model, block_size=BLOCK), stock_make_prompt_cache(model)
    if not is_hooked:
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", mlx_attention)
    for tokens in (TEXT[:60], [5], [6]):
        for caches in (cache, plain):
            mx.eval(model(mx.array([tokens]), cache=caches))
        for c in window_layers(cache):
            poison(c)
    assert_continues(model, cache, [8, 2, 6], plain)


def poison(cache) -> None:
    """NaN in all blocks that the cache does not hold."""
    pool, kv = cache.layer.pool, cache.layer.kv
    row = cache.rows[0]
    held = pool.allocator.table(row.id)[row.first_held // BLOCK :].tolist()
    slots = [s for s in range(kv.num_blocks * BLOCK) if s // BLOCK not in held]
    k, v = (mx.full((len(slots), x.shape[0], x.shape[3]), mx.nan) for x in (kv.k[0], kv.v[0]))
    kv.write(0, k, v, mx.array(slots, mx.int32))


def test_forwards_that_are_evaluated_later_read_what_was_there(model):
    """The last layer's attention over blocks that later forwards write."""
    cache, plain = filled(model, TEXT[:9]), stock_filled(model, TEXT[:9])
    logits = [[model(mx.array([[t]]), cache=c) for t in TEXT[9:40]] for c in (cache, plain)]
    mx.eval(logits[0][::-1])
    assert all(mx.allclose(a, b, atol=1e-3) for a, b in zip(*logits, strict=True))


def test_layers_of_a_window_have_to_go_on_together():
    first, second = window_layers(filled(windowed("gemma3", num_hidden_layers=3), TEXT[:5]))
    for _ in range(30):
        first.update_and_fetch(*[mx.ones((1, 2, 1, 8))] * 2)
    with pytest.raises(ValueError, match="is at position 5, but others of its window let"):
        second.update_and_fetch(*[mx.ones((1, 2, 1, 8))] * 2)


def test_all_pools_of_a_model_stay_within_the_memory_together(model):
    caches, limit = [], 40 * 3 * BLOCK * 2 * 2 * 8 * 4
    with pytest.raises(OutOfBlocksError):
        while len(caches) < 30:
            caches.append(filled(model, TEXT[: 2 * BLOCK - 1], kv_memory=limit))
    pools = {c.layer.pool for c in caches[0]}
    assert len(caches) == 20
    assert len(pools) == 2 and sum(pool.nbytes for pool in pools) <= limit


def test_a_forward_does_not_evaluate_the_one_before(model, monkeypatch):
    cache = filled(model, TEXT[: 3 * WINDOW])
    for name in ("eval", "async_eval"):
        monkeypatch.setattr(mx, name, lambda *args: pytest.fail("a forward evaluated something"))
    for token in TEXT[:3]:
        model(mx.array([[token]]), cache=cache)
