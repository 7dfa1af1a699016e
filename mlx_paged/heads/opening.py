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
from mlx_paged.heads.mtp_files import NAME, open_mtp
from mlx_paged.heads.mtp_layouts import LAYOUTS

MOST_CONFIG_BYTES = 1 << 20


def open_head(path: str | PathLike[str], target: nn.Module) -> Head:
    """The head at a path, bound to the model `target`.

    Args:
        path: a folder with the ``config.json`` and safetensors of an EAGLE-3 head, or what
            :func:`~mlx_paged.heads.mtp_files.open_mtp` takes.
        target: the model that it guesses for.

    Raises:
        ValueError: it cannot be read, is of no known kind or is not one of this model.
    """
    folder = Path(path)
    if not folder.exists():
        raise ValueError(f"draft head {path}: expected a folder or a file with a head")
    try:
        if folder.is_file() or _is_mtp(folder):
            head: Head = open_mtp(folder)
        else:
            head = _eagle3(_config(folder / "config.json"), _weights(folder), target)
    except ValueError as error:
        reason = str(error).removeprefix("draft head: ").removeprefix(f"{folder}: ")
        raise ValueError(f"draft head {path}: {reason}") from None
    head.bind(target)
    mx.eval(head.parameters())
    return head


def _is_mtp(folder: Path) -> bool:
    """Whether a folder has an extracted MTP head, or a checkpoint that may have one."""
    if (folder / NAME).is_file():
        return True
    return str(_config(folder / "config.json").get("model_type")) in LAYOUTS


def _eagle3(config: Mapping[str, Any], weights: Mapping[str, mx.array], target: nn.Module) -> Head:
    names = *config.get("architectures", ()), config.get("speculators_model_type", "")
    if not any("eagle3" in str(name).lower() for name in names):
        raise ValueError(
            f"its architecture is {names}: expected one of EAGLE-3, or an MTP head "
            "(docs/mtp-heads.md)"
        )
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
