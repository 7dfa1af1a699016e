"""Files of tensors, checked before MLX reads them."""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx

MOST_HEADER_BYTES = 1 << 22
TYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The types of tensors that a file may have, and the bytes of an element."""


def load_tensors(path: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file, by name. None is read before all of the file's header is
    found to be right: its size, and of each tensor the type, the shape and the place in the file.

    Raises:
        ValueError: the file is no such file, or has other types.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        _require(8 < 8 + length <= size, path, f"a header of {length} bytes in {size} bytes")
        _require(length <= MOST_HEADER_BYTES, path, f"a header of {length} bytes")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    _require(isinstance(header, dict), path, "a header that is no JSON object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        _check(path, name, entry, size - 8 - length)
    loaded = mx.load(str(path), format="safetensors")
    assert isinstance(loaded, dict)
    _require(loaded.keys() == header.keys(), path, "other tensors than its header says")
    return loaded


def _check(path: Path, name: str, entry: Any, size: int) -> None:
    """ValueError unless a tensor has the place that its shape needs in `size` bytes."""
    fields = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    place: Any = fields.get("data_offsets")
    _require(
        isinstance(dtype, str) and dtype in TYPE_BYTES, path, f"{name:.200} of type {dtype!r:.40}"
    )
    are_counts = _are_counts(shape) and _are_counts(place) and len(place) == 2
    _require(are_counts and len(shape) <= 4, path, f"{name:.200} without a shape and a place")
    start, end = place
    fits = end - start == math.prod(shape) * TYPE_BYTES[dtype] and end <= size
    _require(fits, path, f"{name:.200} of shape {shape!r:.60} elsewhere")


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def _require(holds: bool, path: Path, found: str) -> None:
    if not holds:
        expected = f"a safetensors file of {', '.join(TYPE_BYTES)}"
        raise ValueError(f"{path.name} has {found}: expected {expected}")
