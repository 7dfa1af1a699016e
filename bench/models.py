"""The models that benches run: Llama's shape with random weights, and a real chat model."""

import json
from copy import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama

from bench.names import REAL, REFERENCE, SIZES, real_model
from mlx_paged.loading import load_model as load


def gguf_of(name: str) -> Path | None:
    """The one GGUF file beside the directory of a model; None if there is none, or several."""
    directory = real_model(name) if name in REAL else Path(name)
    files = list(directory.resolve().parent.glob("*.gguf")) if directory.is_dir() else []
    return files[0] if len(files) == 1 else None


def named_model(name: str) -> nn.Module:
    """A model of :data:`MODELS`; ValueError if a real one is not there."""
    return load(str(real_model(name)))[0] if name in REAL else llama_model(name)


def vocab_size(name: str) -> int:
    """Of a model of :data:`MODELS`."""
    if name in SIZES:
        return int(SIZES[name]["vocab_size"])
    return int(json.loads((real_model(name) / "config.json").read_text())["vocab_size"])


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


def random_prompts(num_prompts: int, num_tokens: int, name: str, seed: int = 0) -> list[list[int]]:
    """Token ids below the vocabulary of a model, ``[num_prompts][num_tokens]``."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(vocab_size(name), size=(num_prompts, num_tokens))
    return [row.tolist() for row in ids]
