"""Files of an adapter's tensors, checked before MLX reads them."""

from pathlib import Path

import mlx.core as mx

from mlx_paged.tensor_files import header

MOST_HEADER_BYTES = 1 << 22
MOST_DIMENSIONS = 4
TYPES = "F64", "F32", "F16", "BF16"
"""The types of tensors that a file may have."""


def load_tensors(path: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file, by name. None is read before all of the file's header is
    found to be right: its size, and of each tensor the type, the shape and the place in the file.

    Raises:
        ValueError: the file is no such file, or has other types.
        OSError: it cannot be read.
    """
    expected = f"expected a safetensors file of {', '.join(TYPES)}"
    try:
        tensors, _ = header(path, MOST_HEADER_BYTES)
    except ValueError as error:
        raise ValueError(f"{error}: {expected}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPES or len(tensor.shape) > MOST_DIMENSIONS:
            raise ValueError(
                f"{path.name} has {name:.200} of type {tensor.dtype!r:.40} and "
                f"{len(tensor.shape)} dimensions: {expected}"
            )
    try:
        loaded = mx.load(str(path), format="safetensors")
    except RuntimeError as error:  # of what JSON allows, and MLX's reader does not
        raise ValueError(f"{path.name} cannot be read by MLX: {expected}") from error
    assert isinstance(loaded, dict) and loaded.keys() == tensors.keys()
    return loaded
