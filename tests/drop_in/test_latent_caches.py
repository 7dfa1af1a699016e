"""Drop-in caches of latent attention (MLA): a latent is stored once, decodes attend in place."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as stock

from mlx_paged.attention.forward import path_counts
from mlx_paged.attention.sdpa_hook import mlx_attention
from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.drop_in.kv_caches import PagedKVCache
from mlx_paged.drop_in.pool_layer import layer_of
from mlx_paged.drop_in.shared_pool import SharedPool
from mlx_paged.kv.shapes import KVShape
from mlx_paged.runner.model_probe import leaves
from tests.support.drop_in.prompt_cache_cases import (
    BLOCK,
    as_stock,
    check_integrity,
    contents,
    greedy,
    merged,
    pool_of,
    same,
    stock_make_prompt_cache,
)
from tests.support.models.architectures import VOCAB, build
from tests.support.ops.paged_cases import memory_limit

pytestmark = pytest.mark.usefixtures("patched")


RANK, ROPE = 16, 8
LATENT = KVShape(1, RANK + ROPE, RANK, mx.float32, latent=True)
NUM_LAYERS = {
    "deepseek_v3": 2,
    "glm4_moe_lite": 2,
    "kimi_linear": 1,
    "kimi_vl": 2,
    "longcat_flash": 4,
    "mistral4": 2,
}
"""Layers of latent attention in each architecture."""

NUM_DECODES = 6
_rng = np.random.default_rng(7)
PROMPTS = [_rng.integers(1, VOCAB, length).tolist() for length in (23, 5, 14)]
TOKENS = _rng.integers(1, VOCAB, (len(PROMPTS), NUM_DECODES)).tolist()


@pytest.fixture(scope="module")
def models():
    """Built models by name."""
    built = {}
    return lambda name: built.setdefault(name, build(name))


@pytest.fixture
def model(models):
    return models("deepseek_v3")


def paged(model) -> list:
    return make_prompt_cache(model, block_size=BLOCK)


def filled(model, prompt, make=paged) -> list:
    cache = make(model)
    model(mx.array([prompt]), cache=cache)
    mx.eval([c.state for c in cache])
    return cache


def decoded(model, cache, rows) -> np.ndarray:
    """Log-probabilities ``[B, NUM_DECODES, vocab]`` of decodes of given tokens."""
    columns = mx.array(rows).T
    steps = [model(column[:, None], cache=cache)[:, 0] for column in columns]
    logits = mx.stack(steps, axis=1)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def solo(model, i: int) -> np.ndarray:
    """The same for one row, by mlx-lm's own cache."""
    return decoded(model, filled(model, PROMPTS[i], stock_make_prompt_cache), [TOKENS[i]])[0]


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NUM_LAYERS)
def test_decodes_attend_in_place_and_have_mlx_lms_logits(name, models):
    model = models(name)
    cache = filled(model, PROMPTS[0])
    path_counts.clear()
    assert_close(decoded(model, cache, TOKENS[:1])[0], solo(model, 0))
    assert path_counts == {"paged": NUM_LAYERS[name] * NUM_DECODES}
    layers = [leaf.layer for leaf in leaves(cache) if isinstance(leaf, PagedKVCache)]
    assert [layer.shape for layer in layers] == [LATENT] * NUM_LAYERS[name]


@pytest.mark.slow
def test_a_ragged_batch_attends_in_place_and_has_each_rows_logits(model):
    batch = merged([filled(model, prompt) for prompt in PROMPTS])
    path_counts.clear()
    together = decoded(model, batch, TOKENS)
    assert path_counts == {"paged": 2 * NUM_DECODES}
    for i in range(len(PROMPTS)):
        assert_close(together[i], solo(model, i))
    pool = batch[0].layer.pool
    assert pool.nbytes == 2 * pool.allocator.num_blocks * BLOCK * (RANK + ROPE) * 4
    check_integrity(pool)


@pytest.mark.slow
def test_decodes_gather_no_context():
    """One gathered latent would take as much as a decode may."""
    model = build("deepseek_v3", max_position_embeddings=8192)
    cache = paged(model)
    for c in cache:
        c.update_and_fetch(*(mx.random.normal((1, 1, 6000, dim)) for dim in (RANK, ROPE)))
    token = mx.array([[5]])
    mx.eval(model(token, cache=cache))
    with memory_limit(6000 * RANK * 4):
        for _ in range(3):
            mx.eval(model(token, cache=cache))


class TestReads:
    """Every way to read a cache gives the latents and the rotary keys that the model stored."""

    @pytest.fixture
    def cache(self, model):
        return filled(model, PROMPTS[0])

    @pytest.fixture
    def expected(self, model):
        return contents(filled(model, PROMPTS[0], stock_make_prompt_cache))

    def test_keys_and_values(self, cache, expected):
        assert [x.shape[-1] for x in expected] == [RANK, ROPE] * 2
        assert same(contents(cache), expected)
        assert [x.shape[-1] for c in cache for x in (c.keys, c.values)] == [RANK, ROPE] * 2

    def test_a_copy_as_mlx_lms_own_cache(self, model, cache, expected):
        own = [as_stock(c) for c in cache]
        assert same(contents(own), expected)
        assert_close(decoded(model, own, TOKENS[:1])[0], solo(model, 0))

    def test_a_batch_as_mlx_lms_own_cache(self, model):
        batch = [as_stock(c) for c in merged([filled(model, prompt) for prompt in PROMPTS])]
        together = decoded(model, batch, TOKENS)
        assert_close(together[1], solo(model, 1))

    @pytest.mark.slow
    def test_a_saved_cache(self, model, cache, expected, tmp_path):
        file = str(tmp_path / "cache.safetensors")
        stock.save_prompt_cache(file, cache)
        loaded = stock.load_prompt_cache(file)
        assert same(contents(loaded), expected)
        generator = BatchGenerator(model)
        (uid,) = generator.insert([[7]], [NUM_DECODES], caches=[loaded])
        path_counts.clear()
        responses = [generator.next()[1] for _ in range(NUM_DECODES + 1)]
        tokens = [r.token for found in responses for r in found if r.uid == uid]
        own = filled(model, PROMPTS[0], stock_make_prompt_cache)
        assert tokens == greedy(model, [7], own, NUM_DECODES)
        assert path_counts["paged"] > 0 and not path_counts["gather"]

    def test_a_state_and_what_is_restored_from_it(self, cache, expected):
        states = [c.state for c in cache]
        keys, values, num_tokens = states[0]
        assert num_tokens == len(PROMPTS[0])
        assert (keys.shape[-1], values.shape[-1]) == (RANK, ROPE)
        copies = [(mx.array(k), mx.array(v), n) for k, v, n in states]
        for given in (states, copies):
            restored = make_prompt_cache_like(cache)
            for c, state in zip(restored, given, strict=True):
                c.state = state
            assert same(contents(restored), expected)

    def test_forks_and_trims(self, model, cache, expected):
        fork = copy.deepcopy(cache)
        assert_close(decoded(model, fork, TOKENS[:1])[0], solo(model, 0))
        assert stock.trim_prompt_cache(fork, NUM_DECODES) == NUM_DECODES
        assert same(contents(fork), expected) and same(contents(cache), expected)
        check_integrity(pool_of(cache))

    def test_a_sequence_of_another_pool(self, model, cache, expected):
        elsewhere = filled(model, PROMPTS[1], lambda m: make_prompt_cache(m, block_size=8))
        assert pool_of(elsewhere) is not pool_of(cache)
        batch = merged([elsewhere, cache])
        assert same(contents([c.extract(1) for c in batch]), expected)
        path_counts.clear()
        together = decoded(model, batch, [TOKENS[1], TOKENS[0]])
        assert path_counts == {"paged": 2 * NUM_DECODES}
        assert_close(together[0], solo(model, 1))
        assert_close(together[1], solo(model, 0))

    def test_a_handle_with_a_dependency(self, model, cache, expected):
        for c in cache:
            c.keys = mx.depends([c.keys], [mx.zeros(3)])[0]
            c.values = mx.depends([c.values], [mx.zeros(3)])[0]
        assert same(contents(cache), expected)
        assert_close(decoded(model, cache, TOKENS[:1])[0], solo(model, 0))


def make_prompt_cache_like(cache) -> list:
    """Empty caches of the same layers."""
    sequence = pool_of(cache).new_sequence()
    return [PagedKVCache.of(c.layer, [sequence], [0], c.window) for c in cache]


@pytest.mark.parametrize("length", [1, 3])
def test_keys_and_values_of_one_head_and_two_widths_are_attended_as_such(length):
    pool = SharedPool(1, BLOCK)
    cache = PagedKVCache.of(layer_of(pool, 0), [pool.new_sequence()], [0])
    q, k, v = (mx.random.normal(s) for s in ((1, 4, length, 8), (1, 1, 9, 8), (1, 1, 9, 6)))
    first, last = ([x[:, :, part] for x in (k, v)] for part in (slice(-length), slice(-length, 9)))
    cache.update_and_fetch(*first)
    kept = cache.update_and_fetch(*last)
    out = mx.fast.scaled_dot_product_attention(q, *kept, scale=0.3, mask="causal")
    assert mx.allclose(out, mlx_attention(q, k, v, scale=0.3, mask="causal"), atol=1e-5)


def test_a_layer_keeps_its_widths(model):
    cache = filled(model, PROMPTS[1])[0]
    keys, values = mx.zeros((1, 1, 1, ROPE)), mx.zeros((1, 1, 1, RANK))
    with pytest.raises(ValueError, match=r"= \(1, 8, 16\): expected \(1, 16, 8\) as before"):
        cache.update_and_fetch(keys, values)


@pytest.mark.slow
def test_the_layers_that_pick_tokens_by_an_indexer_have_mlx_lms_tokens(models):
    model = models("deepseek_v32")
    texts = [greedy(model, p, stock_make_prompt_cache(model), NUM_DECODES) for p in PROMPTS[:2]]
    assert [greedy(model, p, paged(model), NUM_DECODES) for p in PROMPTS[:2]] == texts


def test_a_pool_that_grew_holds_each_latent_once():
    before = mx.get_active_memory()
    pool = SharedPool(1, BLOCK)
    cache = PagedKVCache.of(layer_of(pool, 0), [pool.new_sequence()], [0])
    for _ in range(9):
        cache.update_and_fetch(*(mx.zeros((1, 1, 500, dim)) for dim in (512, 64)))
        mx.eval(cache.keys)
    assert mx.get_active_memory() - before < 1.2 * pool.nbytes
