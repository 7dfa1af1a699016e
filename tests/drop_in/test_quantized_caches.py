"""Prompt caches with kv_bits: mlx-lm's tokens over the same values, also after a save."""

import copy
import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as stock

from mlx_paged.attention.sdpa_hook import attention_hook
from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.ops.formats import FORMATS
from tests.support.drop_in.prompt_cache_cases import (
    BLOCK,
    PROMPT,
    filled,
    greedy,
    stock_make_prompt_cache,
)
from tests.support.models.tiny_models import tiny_model
from tests.support.ops.numpy_quantization import (
    BITS,
    quantize,
    quantized_mlx_lm,
    rounded,
    rounded_in_rotation,
)

MODELS = "llama", "gemma3_text"
every_format = pytest.mark.parametrize("kv_bits", BITS)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return tiny_model(request.param)


def expected(model, kv_bits, tokens=PROMPT, num_tokens=12):
    with quantized_mlx_lm(kv_bits):
        return greedy(model, tokens, stock_make_prompt_cache(model), num_tokens)


def stored(cache):
    return [np.array(mx.array(a)) for layer in cache for a in layer.state[4:]]


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.sampled(6)
@every_format
@pytest.mark.parametrize("is_hooked", [True, False])
def test_tokens_are_those_of_mlx_lm_over_the_same_values(model, kv_bits, is_hooked):
    cache = make_prompt_cache(model, block_size=BLOCK, kv_bits=kv_bits)
    assert all(layer.empty() for layer in cache)
    if is_hooked:
        with attention_hook():
            assert greedy(model, PROMPT, cache, 12) == expected(model, kv_bits)
    else:
        assert greedy(model, PROMPT, cache, 12) == expected(model, kv_bits)
    assert cache[0].layer.kv.k[0].dtype == FORMATS[kv_bits][0].dtype


@every_format
def test_shown_arrays_are_what_is_stored(model, kv_bits):
    cache, plain = filled(model, kv_bits=kv_bits), filled(model)
    first = cache[0].keys, cache[0].values
    for got, exact, form in zip(
        first, (plain[0].keys, plain[0].values), FORMATS[kv_bits], strict=True
    ):
        np.testing.assert_allclose(
            np.array(mx.array(got)),
            rounded_in_rotation(np.array(mx.array(exact)), form.bits),
            atol=0.02,
        )
        assert got.dtype == exact.dtype and got.shape == exact.shape
    sizes = [sum(layer.nbytes for layer in layers) for layers in (cache, plain)]
    assert sizes[0] < sizes[1] / 2


@pytest.mark.sampled(4)
@every_format
def test_forks_trims_and_batches(model, kv_bits):
    cache = filled(model, PROMPT[:-1], kv_bits=kv_bits)
    fork, joined = copy.deepcopy(cache), copy.deepcopy(cache)
    want = expected(model, kv_bits)
    with attention_hook():
        assert greedy(model, PROMPT[-1:], fork, 12) == want  # copies the tail block
        batch = [type(layer).merge([layer, layer]) for layer in joined]
        logits = model(mx.array([PROMPT[-1:]] * 2), cache=batch)[:, -1]
        assert np.array(mx.argmax(logits, axis=-1)).tolist() == want[:1] * 2
        alone = [layer.extract(1) for layer in batch]
        assert type(alone[0]) is type(cache[0])
        assert greedy(model, want[:1], alone, 11) == want[1:]
        if stock.can_trim_prompt_cache(cache):
            model(mx.array([[3, 1, 4]]), cache=cache)
            stock.trim_prompt_cache(cache, 3)
        assert greedy(model, PROMPT[-1:], cache, 12) == want


@every_format
def test_another_pool_gets_the_same_elements(kv_bits):
    model, found = tiny_model("llama"), []
    cache = filled(model, kv_bits=kv_bits)

    def elsewhere():
        other = filled(model, kv_bits=kv_bits)
        found.extend(stored(other))
        mx.eval([layer.state for layer in other])
        others.extend(other)

    others: list = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert others[0].layer.pool is not cache[0].layer.pool
    batch = [type(a).merge([a, b]) for a, b in zip(cache, others, strict=True)]
    assert_same(stored([layer.extract(1) for layer in batch]), found)


@every_format
def test_blocks_keep_their_elements_when_the_pool_grows_and_shrinks(kv_bits):
    model = tiny_model("llama")
    cache = filled(model, kv_bits=kv_bits)
    before, pool = stored(cache), cache[0].layer.pool
    blocks = pool.allocator.num_blocks
    more = filled(model, PROMPT * 8, kv_bits=kv_bits)
    assert more[0].layer.pool is pool and pool.allocator.num_blocks > 2 * blocks
    assert_same(stored(cache), before)
    many = pool.allocator.num_blocks
    del more
    pool.settle()
    assert pool.allocator.num_blocks < many / 2
    assert_same(stored(cache), before)


@pytest.mark.sampled(4)
@every_format
def test_saved_caches_go_on(model, kv_bits, tmp_path):
    file = str(tmp_path / "cache.safetensors")
    cache = filled(model, PROMPT[:-1], kv_bits=kv_bits)
    before = stored(cache)
    stock.save_prompt_cache(file, cache, {"about": "test"})
    loaded, metadata = stock.load_prompt_cache(file, return_metadata=True)
    assert metadata == {"about": "test"}
    assert [type(layer) for layer in loaded] == [type(layer) for layer in cache]
    assert_same(stored(loaded), before)
    with attention_hook():
        assert greedy(model, PROMPT[-1:], loaded, 12) == expected(model, kv_bits)
    assert_same(stored(cache), before)


def test_an_empty_cache_can_be_saved(tmp_path):
    file = str(tmp_path / "cache.safetensors")
    model = tiny_model("llama")
    stock.save_prompt_cache(file, make_prompt_cache(model, kv_bits=8))
    loaded = stock.load_prompt_cache(file)
    with attention_hook():
        assert greedy(model, PROMPT, loaded, 12) == expected(model, 8)


@every_format
def test_a_state_that_says_nothing_of_rotation_has_none(model, kv_bits):
    """As earlier versions saved it. It may be batched with newer ones."""
    layer, exact = filled(model, kv_bits=kv_bits)[0], filled(model)[0]
    kind, *about = layer.state[:4]
    assert kind == f"{kv_bits} rotated"
    rows = [np.array(mx.array(x)) for x in (exact.keys, exact.values)]
    bits = [form.bits for form in FORMATS[kv_bits]]
    elements, scales = zip(*map(quantize, rows, bits), strict=True)
    state = [str(kv_bits), *about, *map(mx.array, (*elements, *scales))]
    older = type(layer).from_state(state)
    assert_same([np.array(mx.array(x)) for x in older.state[4:]], map(np.array, state[4:]))
    batch = type(layer).merge([older, layer])
    found = [np.array(mx.array(x)) for x in (batch.keys, batch.values)]
    for got, want, of in zip(found, rows, bits, strict=True):
        np.testing.assert_allclose(got[:1], rounded(want, of), atol=2e-3)
        twice = {8: 0.1, 6: 0.4, 4: 1.0}[of]  # rounded with and without rotation
        np.testing.assert_allclose(got[1:], want, atol=twice)


@pytest.mark.slow
def test_a_reader_without_this_package_is_told_the_class(tmp_path):
    file = str(tmp_path / "cache.safetensors")
    stock.save_prompt_cache(file, filled(tiny_model("llama"), kv_bits=8))
    code = f"from mlx_lm.models.cache import load_prompt_cache as f; f({file!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "KeyError: 'QuantizedPagedKVCache'" in done.stderr
    known = subprocess.run([sys.executable, "-c", f"import mlx_paged.drop_in.caches; {code}"])
    assert known.returncode == 0


def test_latents_are_refused():
    with pytest.raises(ValueError, match=r"kv_bits is 8, but a layer stores latents \(MLA\)"):
        filled(tiny_model("deepseek_v3"), kv_bits=8)


def test_other_bits_are_refused():
    with pytest.raises(ValueError, match=r"\[make_prompt_cache\] kv_bits is 5: expected 8"):
        make_prompt_cache(tiny_model("llama"), kv_bits=5)
