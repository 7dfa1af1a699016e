"""The models that benches run: Llama's shape, random weights."""

from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama

REFERENCE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}

SIZES: dict[str, dict[str, Any]] = {
    "reference": REFERENCE,
    "many-kv-heads": REFERENCE | {"num_key_value_heads": 8},
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128,
    },
}
"""By name. Published numbers are measured with "reference". "many-kv-heads" has four times the K/V
(16 KiB a token). "tiny" is for tests."""


def llama_model(size: str = "reference", seed: int = 0) -> nn.Module:
    """A Llama with random float32 weights; `size` is a key of :data:`SIZES`."""
    return random_llama(SIZES[size], seed)


def random_llama(size: dict[str, Any], seed: int = 0) -> nn.Module:
    """A Llama of any size with random float32 weights."""
    mx.random.seed(seed)
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    model = llama.Model(llama.ModelArgs.from_dict(config | size))
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def successors(vocab_size: int) -> list[int]:
    """For each token the one that follows it in the texts of a copying model: one long circle."""
    order = np.random.default_rng(11).permutation(vocab_size)
    following = np.empty_like(order)
    following[order] = np.roll(order, -1)
    return [int(token) for token in following]


def copying_llama(size: str = "reference") -> nn.Module:
    """The model :func:`llama_model`, but after each token it says its successor: embeddings are
    large beside what the layers add, and the head knows each token by that of the one before."""
    model = llama_model(size)
    embeddings = mx.random.normal(model.model.embed_tokens.weight.shape)
    head = mx.zeros_like(embeddings)
    head[mx.array(successors(len(embeddings)))] = embeddings
    model.model.embed_tokens.weight = 100 * embeddings
    model.lm_head.weight = head
    mx.eval(model.parameters())
    return model


def first_layers(model: nn.Module, count: int) -> nn.Module:
    """A Llama of the first layers of `model`, with the same weights."""
    shorter, shorter.model = copy(model), copy(model.model)
    shorter.model.layers = model.model.layers[:count]
    return shorter


def one_random_layer(vocab_size: int) -> nn.Module:
    """The first layer of a Llama of random weights."""
    return random_llama(REFERENCE | {"num_hidden_layers": 1, "vocab_size": vocab_size}, seed=1)


def random_prompts(num_prompts: int, num_tokens: int, size: str, seed: int = 0) -> list[list[int]]:
    """Token ids below the vocabulary of `size`, ``[num_prompts][num_tokens]``."""
    ids = np.random.default_rng(seed).integers(
        SIZES[size]["vocab_size"], size=(num_prompts, num_tokens)
    )
    return [row.tolist() for row in ids]
