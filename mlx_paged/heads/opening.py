"""Reads a head from the files in which it is published."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.heads.eagle3 import Eagle3Head, eagle3_config
from mlx_paged.heads.head import Head

MOST_CONFIG_BYTES = 1 << 20


def open_head(path: str | PathLike[str], target: nn.Module) -> Head:
    """The head in a folder with ``config.json`` and safetensors, bound to the model `target`.

    Raises:
        ValueError: it cannot be read, is of no known kind or is not one of this model.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"draft head {path}: expected a folder with config.json and safetensors")
    try:
        head = _eagle3(_config(folder / "config.json"), _weights(folder), target)
    except ValueError as error:
        raise ValueError(f"draft head {path}: {str(error).removeprefix('draft head: ')}") from None
    head.bind(target)
    mx.eval(head.parameters())
    return head


def _eagle3(config: Mapping[str, Any], weights: Mapping[str, mx.array], target: nn.Module) -> Head:
    names = *config.get("architectures", ()), config.get("speculators_model_type", "")
    if not any("eagle3" in str(name).lower() for name in names):
        raise ValueError(f"its architecture is {names}: expected one of EAGLE-3")
    has_embeddings = any(name.endswith("embed_tokens.weight") for name in weights)
    head = Eagle3Head(eagle3_config(config), len(getattr(target, "layers", [])), has_embeddings)
    head.load(weights)
    return head


def _config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_CONFIG_BYTES:
            raise ValueError(f"{path.name} is larger than {MOST_CONFIG_BYTES} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} holds no object")
    return config


def _weights(folder: Path) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("it has no safetensors")
    for file in files:
        try:
            loaded = mx.load(str(file))
        except Exception as error:
            raise ValueError(f"{file.name} cannot be read: {error}") from None
        assert isinstance(loaded, dict)
        weights |= loaded
    return weights
