"""Files of an adapter's tensors, whose headers are checked before a tensor is read."""

from pathlib import Path

from mlx_paged.arguments import MAX_INT32
from mlx_paged.tensor_files import Stored, header

MOST_HEADER_BYTES = 1 << 22
MOST_DIMENSIONS = 4
TYPES = "F64", "F32", "F16", "BF16"
"""The types of tensors that a file may have."""


def stored_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by name: of each the type, the shape and the place in the
    file, which are found to be right. Reads the header alone.

    Raises:
        ValueError: the file is no such file, or has other types.
        OSError: it cannot be read.
    """
    expected = f"expected a safetensors file of {', '.join(TYPES)}"
    try:
        tensors, metadata = header(path, MOST_HEADER_BYTES)
    except ValueError as error:
        raise ValueError(f"{error}: {expected}") from error
    if not isinstance(metadata, dict | None):  # MLX writes null for none
        raise ValueError(f"{path.name} has metadata that are no object: {expected}")
    for name, tensor in tensors.items():
        if not name.isprintable():
            raise ValueError(f"{path.name} has the tensor {name!a:.200}: {expected}")
        is_known = tensor.dtype in TYPES and len(tensor.shape) <= MOST_DIMENSIONS
        if not is_known or max(tensor.shape, default=0) > MAX_INT32:
            raise ValueError(
                f"{path.name} has {name:.200} of type {tensor.dtype!r:.40} and shape "
                f"{tensor.shape!s:.80}: {expected} of at most {MOST_DIMENSIONS} dimensions"
            )
    return tensors
