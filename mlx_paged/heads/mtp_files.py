"""Files of extracted heads: one safetensors file, whose metadata is the model's configuration."""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_paged.heads.checkpoint import Checkpoint
from mlx_paged.heads.mtp import MTPHead
from mlx_paged.heads.mtp_layouts import OPTIONAL
from mlx_paged.heads.mtp_weights import head_of
from mlx_paged.tensor_files import header

NAME = "head.safetensors"
"""The name of an extracted head in the folder of its model."""
KEY = "mlx_paged.mtp"
"""The key in a file's metadata whose value says of which model and configuration the head is."""
GROUP_SIZE = 64
BITS = (4, 8)


def extract(source: Path, file: Path, bits: int | None = None) -> MTPHead:
    """Write the head of the checkpoint in folder `source` to `file`, and return it.

    Args:
        source: a checkpoint as it was published, with config.json.
        file: its name ends with ``.safetensors``. A file of this name is replaced.
        bits: of the quantized matrices: 4, 8, or None for weights as they are stored.

    Raises:
        ValueError: the checkpoint has no head, a head that is not read, or one with other tensors
            than its configuration says.
    """
    if file.suffix != ".safetensors":
        raise ValueError(f"{file}: expected a name that ends with .safetensors")
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent}: no such directory")
    head = head_of(Checkpoint(source))
    if bits is not None:
        nn.quantize(head, GROUP_SIZE, bits, class_predicate=_is_quantized)
    weights: dict[str, mx.array] = tree_flatten(head.parameters(), destination={})
    for array in weights.values():
        mx.eval(array)  # one by one: what it is made of is freed
    about = {"model_type": head.model_type, "config": head.config, "bits": bits}
    part = file.with_name(f".{file.stem}.part.safetensors")
    try:
        mx.save_safetensors(str(part), weights, {KEY: json.dumps(about), "format": "mlx"})
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
    return head


def open_mtp(path: Path) -> MTPHead:
    """The head at a path: a file of :func:`extract`, a folder that has such a file named `NAME`, or
    a folder with a published checkpoint. Raises ValueError if there is none."""
    if path.is_dir():
        return _read(path / NAME) if (path / NAME).is_file() else head_of(Checkpoint(path))
    if not path.is_file():
        raise ValueError(f"{path}: no such file or directory")
    return _read(path)


def _read(file: Path) -> MTPHead:
    tensors, metadata = header(file)
    try:
        about = json.loads(metadata[KEY])
        model_type = str(about["model_type"])
        config = dict(about["config"])
        bits = about["bits"]
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: it is no file of `mlx_paged head extract`") from error
    optional = {name for name in OPTIONAL if f"{name}.weight" in tensors}
    head = MTPHead(model_type, config, optional)
    if bits is not None:
        if bits not in BITS:
            raise ValueError(f"{file}: it has bits {bits}: expected 4 or 8")
        packed = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
        nn.quantize(head, GROUP_SIZE, bits, class_predicate=lambda path, _: path in packed)
    expected = tree_flatten(head.parameters(), destination={})
    for name in sorted(expected.keys() | tensors.keys()):
        found = tensors[name].shape if name in tensors else None
        wanted = expected[name].shape if name in expected else None
        if found != wanted:
            raise ValueError(f"{file}: {name} has shape {found}: expected {wanted}")
    arrays: Any = mx.load(str(file))
    head.load_weights([*arrays.items()])
    return head


def _is_quantized(path: str, module: nn.Module) -> bool:
    """Whether a part is worth its bits: routers choose experts by small differences."""
    is_router = path.endswith(("mlp.gate", "shared_expert_gate"))
    return hasattr(module, "to_quantized") and not is_router and _width(module) % GROUP_SIZE == 0


def _width(module: nn.Module) -> int:
    return int(module["weight"].shape[-1]) if "weight" in module else 1
