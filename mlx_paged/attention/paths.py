"""Which way attention takes: the device, the environment and a layer's shape decide."""

import os
import platform
import re
import warnings
from functools import cache

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.kv.shapes import KVShape

PATHS = "paged", "gather"
"""The paged op, through block tables; blocks gathered into one array, then MLX's own attention."""

VARIABLE = "MLX_PAGED_ATTENTION"  # the environment variable that forces one of the paths

FEW_QUERIES = 8
"""On a GPU, chunks of up to so many tokens of a sequence take the paged op in every layer."""

LONG_CHUNK = 256
"""On a GPU, chunks from so many tokens on may be gathered: only MLX's own attention uses all matrix
units of every GPU."""

LONG_CHUNK_OF_UNITS = 64
"""The same where the GPU has matrix units of its own: the kernel for chunks has none of them."""

MACOS_WITH_UNITS = 26, 2

FUSED_QUERIES = 1024
"""MLX's kernel for matrix units takes heads of 256 from so many queries on, without an array as
mask."""

HEADS_OF_MLX = 64, 72, 80, 96, 128
"""The head dimensions of MLX's fast kernel. For other heads MLX keeps the scores in memory. This
pays only on a GPU with matrix units of its own: there MLX's products are three to four times as
fast as those of this package's kernel, on other GPUs as fast."""

ANY_NUMBER = 2**31


def max_paged_queries() -> int:
    """How many tokens of a sequence take the paged op in every layer, as the default device and the
    environment decide. Callers ask once and keep the answer."""
    path, on_cpu = _forced_path(), mx.default_device() == mx.cpu
    if path is None and on_cpu:
        return ANY_NUMBER
    if path == "gather" or (not on_cpu and ops.are_switched_off()):
        return 0
    return FEW_QUERIES if path is None else ANY_NUMBER


def max_paged_queries_of(shape: KVShape, in_every_layer: int) -> int:
    """How many tokens of a sequence take the paged op in layers of this shape, if queries have its
    dtype; longer chunks are gathered. On a GPU some shapes have a kernel for chunks."""
    dims = shape.head_dim, shape.v_head_dim
    if in_every_layer != FEW_QUERIES or not ops.serves_chunks(shape.dtype, *dims):
        return in_every_layer
    if has_matrix_units():
        return LONG_CHUNK_OF_UNITS - 1
    return LONG_CHUNK - 1 if is_fused(shape) else ANY_NUMBER


def is_fused(shape: KVShape) -> bool:
    """Whether MLX's fast kernel takes layers of this shape."""
    return shape.head_dim == shape.v_head_dim and shape.head_dim in HEADS_OF_MLX


def is_fused_if_long(shape: KVShape, q: mx.array, mask: mx.array | str) -> bool:
    """Whether MLX's fast kernel takes these queries, because they are many: no scores in memory."""
    return (
        shape.head_dim == shape.v_head_dim == 256
        and q.shape[2] >= FUSED_QUERIES
        and q.dtype != mx.float32
        and isinstance(mask, str)
        and mx.default_device() == mx.gpu
        and has_matrix_units()
    )


@cache
def has_matrix_units() -> bool:
    """Whether the GPU has matrix units that MLX uses: the M5 is the first one, and MLX uses its
    units from macOS 26.2 on (``is_nax_available`` of MLX's ``metal/device.cpp``)."""
    version = platform.mac_ver()[0]
    if not version or tuple(map(int, version.split(".")[:2])) < MACOS_WITH_UNITS:
        return False
    name = re.fullmatch(r"applegpu_g(\d+)(.)", str(mx.device_info().get("architecture")))
    return name is not None and int(name[1]) >= (18 if name[2] == "p" else 17)


@cache
def _forced_path() -> str | None:
    """What the environment asks for; None: nothing, or nothing that exists."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted in PATHS:
        return wanted
    if wanted:
        expected = " or ".join(PATHS)
        warnings.warn(f"{VARIABLE} is {wanted!r}: expected {expected}; ignored", stacklevel=3)
    return None
