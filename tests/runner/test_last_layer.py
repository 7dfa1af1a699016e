"""The last layer computes what is sampled, and the model does not change for it."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from mlx_paged import Engine
from mlx_paged.attention.forward import path_counts
from mlx_paged.runner.model_probe import probe
from mlx_paged.runner.skip_unsampled import WORTH_SKIPPING, LastLayer, LogitRows
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model

RNG = np.random.default_rng(0)
WIDTH = 1 << 18
"""Columns that a :class:`Wide` layer computes for a token: 1 MiB in float32."""


def prompt(length: int) -> list[int]:
    return RNG.integers(VOCAB, size=length).tolist()


class Wide(nn.Module):
    """Takes a MiB for every token that it computes, and adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = mx.arange(WIDTH, dtype=mx.float32)

    def __call__(self, x: mx.array) -> mx.array:
        wide = mx.abs(x[..., :1] * self.columns)
        return x * mx.minimum(wide.max(axis=-1, keepdims=True), 0)


def mebibytes_of_a_step(layer: int, *lengths: int) -> float:
    """Peak of a step on these prompts, one of them a sampled one, with a wide layer."""
    model = tiny_model("llama")
    model.layers[layer].mlp = Wide()
    engine = Engine(model, block_size=4, num_blocks=128, prefill_chunk=256, lookahead=False)
    for length in lengths:
        engine.add_request(prompt(length), max_tokens=1)
    mx.eval(model.parameters())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    engine.step()
    return (mx.get_peak_memory() - before) / 2**20


def test_tokens_that_are_not_sampled_are_not_computed():
    num_tokens = 60 + 40 + 30
    assert mebibytes_of_a_step(-2, 60, 40, 30) > num_tokens
    assert mebibytes_of_a_step(-1, 60, 40, 30) < num_tokens / 8


class CountingLayer:
    """Counts the calls of a model's last layer, and the rows of each."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        kind = type(model.layers[-1])
        original = kind.__call__

        def call(layer, x, *args, **kwargs):
            if layer is model.layers[-1]:
                self.rows.append(x.shape[0])
            return original(layer, x, *args, **kwargs)

        monkeypatch.setattr(kind, "__call__", call)


@pytest.mark.parametrize(
    ("length", "rows"),
    [(WORTH_SKIPPING, [WORTH_SKIPPING]), (WORTH_SKIPPING + 1, [WORTH_SKIPPING + 1, 1])],
)
def test_few_tokens_are_not_worth_a_second_call(monkeypatch, length, rows):
    model = tiny_model("llama")
    counting = CountingLayer(model, monkeypatch)
    engine = Engine(model, block_size=4, num_blocks=64, lookahead=False)
    counting.rows.clear()
    engine.add_request(prompt(length), max_tokens=1)
    engine.step()
    assert counting.rows == rows


def test_a_chunk_within_a_prompt_is_one_call(monkeypatch):
    model = tiny_model("llama")
    counting = CountingLayer(model, monkeypatch)
    engine = Engine(model, block_size=4, num_blocks=64, prefill_chunk=32, lookahead=False)
    counting.rows.clear()
    engine.add_request(prompt(60), max_tokens=1)
    engine.step()
    assert counting.rows == [32]


def test_the_last_layer_attends_once_and_only_for_the_sampled_rows():
    model = tiny_model("llama")
    engine = Engine(model, block_size=4, num_blocks=64, lookahead=False)
    engine.add_request(prompt(5), max_tokens=4)
    engine.step()
    engine.add_request(prompt(40), max_tokens=1)
    before = path_counts.total()
    engine.step()
    assert path_counts.total() - before == len(model.layers)


@pytest.mark.parametrize("profile", [False, True], ids=["plain", "profiled"])
def test_the_tokens_are_mlx_lms(profile):
    model = tiny_model("llama")
    prompts = [prompt(length) for length in (70, 3, 45, 17)]
    expected = [solo_greedy(model, p, 12) for p in prompts]
    engine = Engine(model, block_size=4, num_blocks=128, prefill_chunk=24, profile=profile)
    found = engine.generate(prompts, max_tokens=12)
    assert [completion.tokens for completion in found] == expected


class CountingCaches:
    """Counts the narrowed calls of a forward."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def store_only(self) -> None:
        self.calls.append("store")

    def attend_only(self) -> None:
        self.calls.append("attend")


def test_outside_the_context_and_in_other_threads_the_layer_is_whole():
    model, tokens = tiny_model("llama"), mx.array([prompt(7)] * 3)
    before = model(tokens)
    mx.eval(before)
    last, caches = LastLayer.of(model), CountingCaches()
    calls = caches.store_only, caches.attend_only
    with last.narrowed(3, *calls), ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: mx.array_equal(model(tokens), before).item()).result()
    with pytest.raises(KeyError), last.narrowed(3, *calls):
        raise KeyError
    assert mx.array_equal(model(tokens), before)
    assert caches.calls == []
    with last.narrowed(4, *calls):
        assert mx.array_equal(model(tokens), before)
    assert caches.calls == []


def test_within_the_context_the_layer_stores_then_attends():
    model, tokens = tiny_model("llama"), mx.array([prompt(7)] * 3)
    caches, rows = CountingCaches(), LogitRows.of(model).only(mx.array([1]), 0)
    with LastLayer.of(model).narrowed(3, caches.store_only, caches.attend_only), rows:
        assert model(tokens).shape == (1, 7, VOCAB)
    assert caches.calls == ["store", "attend"]


def test_the_models_parameters_and_classes_stay_as_they_are():
    model = tiny_model("llama")
    parameters = dict(tree_flatten(model.parameters()))
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert LastLayer.of(model) is LastLayer.of(model)
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in parameters)
    for name, module in model.named_modules():
        assert isinstance(module, kinds[name]) and type(module).__module__ == kinds[name].__module__


class Altered(nn.Module):
    """A model around another one's layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model.model
        self.lm_head = model.lm_head
        self.args = model.args

    @property
    def layers(self) -> list[nn.Module]:
        return self.inner.layers


class Skips(Altered):
    """Adds the embeddings to what the last layer gives."""

    def __call__(self, inputs: mx.array, cache=None) -> mx.array:
        return self.lm_head(self.inner(inputs, cache) + self.inner.embed_tokens(inputs))


class Backwards(Altered):
    """Calls its last layer first."""

    def __call__(self, inputs: mx.array, cache=None) -> mx.array:
        h = self.inner.embed_tokens(inputs)
        for layer, c in zip(reversed(self.layers), reversed(cache), strict=True):
            h = layer(h, "causal", c)
        return self.lm_head(h)


class Unlisted(Altered):
    """Does not say which its layers are."""

    layers = None

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.inner.layers]

    def __call__(self, inputs: mx.array, cache=None) -> mx.array:
        return self.lm_head(self.inner(inputs, cache))


def test_a_plain_model_needs_no_more_than_the_sampled_rows():
    assert probe(tiny_model("llama")).last_layer_narrows


@pytest.mark.parametrize("altered", [Skips, Backwards, Unlisted])
def test_models_that_need_all_of_their_last_layer_keep_it(altered):
    model = altered(tiny_model("llama"))
    assert not probe(model).last_layer_narrows
    prompts = [prompt(40), prompt(9)]
    expected = [solo_greedy(model, p, 4) for p in prompts]
    completions = Engine(model, block_size=4, num_blocks=64).generate(prompts, max_tokens=4)
    assert [completion.tokens for completion in completions] == expected
