"""Folders of EAGLE-3 heads: one configuration and safetensors, as published or quantized."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_paged.heads.eagle3 import Eagle3Head, eagle3_config
from mlx_paged.heads.mtp_files import BITS, GROUP_SIZE

MOST_CONFIG_BYTES = 1 << 20
QUANTIZATION = "quantization"
"""The key of a configuration that says how matrices are quantized, as in mlx-lm's models."""


def open_eagle3(folder: Path, num_layers: int) -> Eagle3Head:
    """The head in a folder, for a target with so many layers.

    Raises:
        ValueError: the folder has no EAGLE-3 head, or one with a setting that is not read.
    """
    config = read_config(folder / "config.json")
    if not is_eagle3(config):
        names = *config.get("architectures", ()), config.get("speculators_model_type", "")
        raise ValueError(
            f"its architecture is {names}: expected one of EAGLE-3, or an MTP head "
            "(docs/mtp-heads.md)"
        )
    weights = _weights(folder)
    has_embeddings = any(name.endswith("embed_tokens.weight") for name in weights)
    written = config.pop(QUANTIZATION, None)
    head = Eagle3Head(eagle3_config(config), num_layers, has_embeddings)
    if written is not None:
        if written not in [_quantization(bits) for bits in BITS]:
            raise ValueError(
                f"quantization is {written}: expected bits of 4 or 8 and a group_size of "
                f"{GROUP_SIZE}"
            )
        _quantize(head, written["bits"])
    head.load(weights)
    return head


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of an EAGLE-3 head."""
    names = *config.get("architectures", ()), config.get("speculators_model_type", "")
    return any("eagle3" in str(name).lower() for name in names)


def quantize_eagle3(source: Path, out: Path, bits: int) -> None:
    """Write the head of folder `source` with quantized matrices to the folder `out`.

    Raises:
        ValueError: there is no such head, or it is quantized.
    """
    config = read_config(source / "config.json")
    if QUANTIZATION in config:
        raise ValueError(f"{source}: the head is quantized: expected one that is not")
    weights = _weights(source)
    head = open_eagle3(source, 0)
    _quantize(head, bits)
    found: dict[str, mx.array] = tree_flatten(head.parameters(), destination={})
    found |= {name: weights[name] for name in ("d2t", "t2d") if name in weights}
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), found, {"format": "mlx"})
    written = json.dumps(config | {QUANTIZATION: _quantization(bits)}, indent=1)
    (out / "config.json").write_text(written + "\n", encoding="utf-8")


def read_config(path: Path) -> dict[str, Any]:
    """The object of a configuration. Raises ValueError if it cannot be read."""
    try:
        if path.stat().st_size > MOST_CONFIG_BYTES:
            raise ValueError(f"{path.name} is larger than {MOST_CONFIG_BYTES} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} holds no object")
    return config


def _quantization(bits: int) -> dict[str, int]:
    return {"group_size": GROUP_SIZE, "bits": bits}


def _quantize(head: Eagle3Head, bits: int) -> None:
    """Quantize the matrices of whole groups."""

    def is_quantized(_: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and module.weight.shape[1] % GROUP_SIZE == 0

    nn.quantize(head, GROUP_SIZE, bits, class_predicate=is_quantized)


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
