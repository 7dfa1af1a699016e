"""The unit of worth: operations of a model for a token, against products that are counted."""

from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged import Engine
from mlx_paged.kv.worth import KIB
from mlx_paged.runner.layer_operations import OF_STATE, text_work
from mlx_paged.runner.model_probe import probe
from tests.support.models.tiny_models import tiny_model

TOKENS = 5


def counted_products(model, monkeypatch):
    """Operations of the matrix products of a forward of TOKENS tokens, for a token: what MLX is
    asked to multiply, the output projection not among it."""
    counts = Counter()

    def watched(name, original, operations):
        def call(*args, **kwargs):
            result = original(*args, **kwargs)
            counts[name] += operations(result, *args)
            return result

        return call

    def linear(result, layer, x):
        return 2 * result.size * x.shape[-1]

    monkeypatch.setattr(nn.Linear, "__call__", watched("linear", nn.Linear.__call__, linear))

    def gathered(result, x, weight, *_):
        return 2 * result.size * weight.shape[-2]

    monkeypatch.setattr(mx, "gather_mm", watched("experts", mx.gather_mm, gathered))

    def convolved(result, x, weight, *_):
        return 2 * TOKENS * weight.size

    monkeypatch.setattr(mx, "conv1d", watched("conv", mx.conv1d, convolved))
    tokens = mx.arange(1, TOKENS + 1)[None]
    logits = model(tokens, cache=make_prompt_cache(model))
    mx.eval(logits)
    monkeypatch.undo()
    return counts, logits


@pytest.mark.parametrize(
    "name", ["llama", "mixtral", "gemma3_text", "gpt_oss", "lfm2", "jamba", "mamba2"]
)
def test_products_are_those_of_a_forward(name, monkeypatch):
    model = tiny_model(name)
    profile = probe(model)
    counts, logits = counted_products(model, monkeypatch)
    total = counts.total()
    if hasattr(model, "lm_head"):
        total -= 2 * logits.size * model.lm_head.weight.shape[-1]
    work = text_work(model, profile)
    assert work.token - OF_STATE * profile.states.num_elements == total / TOKENS


def test_attention_is_that_of_each_layer_and_window():
    """Four heads of 16: of each pair of a query and a key a product for the score, and one for the
    value."""
    model = tiny_model("gemma3_text")
    pairs = dict(text_work(model, probe(model)).pairs)
    layers = 2 * 4 * (16 + 16)
    assert pairs == {None: 2 * layers, 12: 2 * layers}


def test_latent_attention_counts_as_that_of_decodes():
    """Four heads ask for a latent of 16 and a rotary key of 8, and get a latent."""
    model = tiny_model("deepseek_v3", kv_lora_rank=32)
    assert dict(text_work(model, probe(model)).pairs) == {None: 3 * 2 * 4 * (32 + 8 + 32)}


def test_states_count_by_their_elements():
    model = tiny_model("mamba2")
    profile = probe(model)
    of_conv, of_ssm = 3 * (4 * 32 + 2 * 2 * 16), 4 * 32 * 16
    assert profile.states.num_elements == 3 * (of_conv + of_ssm)


def test_quantized_weights_count_as_what_they_stand_for():
    model = tiny_model("mixtral", hidden_size=64, intermediate_size=128)
    whole = text_work(model, probe(model))
    nn.quantize(model, group_size=32, bits=4)
    assert text_work(model, probe(model)) == whole


def test_an_engine_weighs_blocks_by_its_model():
    model = tiny_model("llama")
    engine = Engine(model, block_size=4, num_blocks=64)
    work = text_work(model, probe(model))
    engine.generate([[*range(1, 42)]], max_tokens=2)
    (prefixes,) = engine.scheduler.allocator.store.prefixes
    num_bytes = 3 * 4 * 2 * 2 * 16 * 4  # layers, tokens, keys and values, heads, width, bytes
    known = sorted(each.worth for each in prefixes.by_block.values() if len(each.tokens) == 32)
    expected = [KIB * work.of(start, start + 4) // num_bytes for start in range(0, 40, 4)]
    assert known == expected and len(set(known)) == 10
