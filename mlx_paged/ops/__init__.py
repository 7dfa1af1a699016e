"""The paged ops. Only this folder imports the compiled module."""

from mlx_paged._ext import (
    BUILT_WITH,
    append_kv,
    cpu_features,
    gather_blocks,
    grown_in_place,
    is_transforming,
    metal,
    padded_arrays,
    pool_zeros,
    reserved_bytes,
    take_from_pool,
    view_as,
)
from mlx_paged.ops.paged import (
    copy_blocks,
    install_in_mlx,
    kernel_for,
    paged_attention,
    paged_attention_varlen,
    serves_chunks,
    uninstall_from_mlx,
    write_kv,
)

__all__ = [
    "BUILT_WITH",
    "append_kv",
    "copy_blocks",
    "cpu_features",
    "gather_blocks",
    "grown_in_place",
    "install_in_mlx",
    "is_transforming",
    "kernel_for",
    "metal",
    "padded_arrays",
    "paged_attention",
    "paged_attention_varlen",
    "pool_zeros",
    "reserved_bytes",
    "serves_chunks",
    "take_from_pool",
    "uninstall_from_mlx",
    "view_as",
    "write_kv",
]
