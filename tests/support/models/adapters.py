"""Adapters of tiny models, with random numbers, in the form in which mlx_lm.lora leaves them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

SIZE = 0.3
"""Of the numbers: so large that each adapter changes tokens."""


def parameters(rank: int = 4, scale: float = 4.0, **more: Any) -> dict[str, Any]:
    """The field ``lora_parameters`` of a configuration."""
    return {"rank": rank, "scale": scale, "dropout": 0.0} | more


def random_arrays(model: nn.Module, seed: int, num_layers: int = 99, **of: Any) -> dict[str, Any]:
    """Factors of all linear layers, by mlx-lm's names. The model gets LoRA layers."""
    linear_to_lora_layers(model, num_layers, parameters(**of))
    arrays = dict(tree_flatten(model.parameters()))
    factors = {name for name in arrays if name.endswith((".lora_a", ".lora_b"))}
    keys = mx.random.split(mx.random.key(seed), len(factors))
    return {
        name: SIZE * mx.random.normal(arrays[name].shape, key=key)
        for name, key in zip(sorted(factors), keys, strict=True)
    }


def write_adapter(folder: Path, arrays: dict[str, Any], num_layers: int = 99, **of: Any) -> Path:
    """A folder as mlx_lm.lora writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    own = {"fine_tune_type": "lora", "num_layers": num_layers, "lora_parameters": parameters(**of)}
    (folder / "adapter_config.json").write_text(json.dumps(own))
    return folder


def greedy(model: nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    """mlx-lm's tokens."""
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens)
    return [int(token) for token, _ in steps]


def with_adapter(model: nn.Module, folder: Path | None) -> nn.Module:
    """The model as mlx-lm loads it with an adapter."""
    return model if folder is None else load_adapters(model, str(folder))
