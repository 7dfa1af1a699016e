"""Headers of safetensors files, checked before a tensor is read. Knows no mlx."""

import json
from dataclasses import dataclass, field
from math import prod
from operator import index
from pathlib import Path
from typing import Any

MAX_HEADER = 1 << 27
"""Bytes of a header at most."""
MOST_DIMENSIONS = 64
BITS = {
    **{"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8},
    **{"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8},
    "BOOL": 8,
}


@dataclass(frozen=True)
class Stored:
    """What a header says of a tensor: the file's name of its type, its shape, and where its bytes
    begin in the file. Tensors of one type and shape are equal, wherever their bytes are."""

    dtype: str
    shape: tuple[int, ...]
    begin: int = field(compare=False)


def header(file: Path, most: int = MAX_HEADER) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors of a file by name, and its metadata. Reads no tensor.

    Args:
        most: bytes of the header.

    Raises:
        ValueError: it is no such file, or has not the bytes that its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as reader:
        length = int.from_bytes(reader.read(8), "little")
        if length > min(size, most):
            raise ValueError(f"{file.name} is no file of safetensors")
        text = reader.read(length)
    try:
        entries: dict[str, Any] = json.loads(text)
        metadata: dict[str, Any] = entries.pop("__metadata__", {})
        places = {name: tuple(map(index, entry["data_offsets"])) for name, entry in entries.items()}
        data = 8 + length
        tensors = {
            name: Stored(
                str(entry["dtype"]), tuple(map(index, entry["shape"])), data + places[name][0]
            )
            for name, entry in entries.items()
        }
        expected = data + max((end for _, end in places.values()), default=0)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{file.name} is no file of safetensors") from error
    if size != expected:
        raise ValueError(f"{file.name} has {size} bytes: expected {expected}")
    for name, tensor in tensors.items():
        begin, end = places[name]
        if len(tensor.shape) > MOST_DIMENSIONS or max(tensor.shape, default=0) >= 1 << 63:
            raise ValueError(f"{file.name}: {name} is no tensor")
        bits = BITS.get(tensor.dtype, 0) * prod(tensor.shape)
        if begin < 0 or end < begin or min(tensor.shape, default=0) < 0:
            raise ValueError(f"{file.name}: {name} is no tensor")
        if bits and 8 * (end - begin) != bits:
            raise ValueError(f"{file.name}: {name} has {end - begin} bytes: expected {bits // 8}")
    return tensors, metadata
