"""The paged ops. Only this folder imports the compiled module."""

import mlx.core  # noqa: F401  registers the array type that the compiled module shares

from mlx_paged import _ext
from mlx_paged._ext import (
    BUILT_WITH as BUILT_WITH,
    ForwardArrays as ForwardArrays,
    KnownAttention as KnownAttention,
    KnownWrite as KnownWrite,
    Tape as Tape,
    append_kv as append_kv,
    are_one as are_one,
    arrays_in as arrays_in,
    attend_known as attend_known,
    clear_compiled as clear_compiled,
    cpu_features as cpu_features,
    decode_arrays as decode_arrays,
    gather_blocks as gather_blocks,
    grown_in_place as grown_in_place,
    has_values as has_values,
    is_transforming as is_transforming,
    keep_compiled as keep_compiled,
    metal as metal,
    padded_arrays as padded_arrays,
    pool_zeros as pool_zeros,
    reserved_bytes as reserved_bytes,
    set_fusion as set_fusion,
    take_from_pool as take_from_pool,
    view_as as view_as,
    with_arrays as with_arrays,
    without_values as without_values,
)
from mlx_paged.ops.dispatch import (
    attends as attends,
    copies_in_place as copies_in_place,
    kernel_for as kernel_for,
    serves_chunks as serves_chunks,
    takes_attention as takes_attention,
    writes_in_place as writes_in_place,
)
from mlx_paged.ops.dispatch import (
    are_switched_off as are_switched_off,
    in_simplest_forms as in_simplest_forms,
    is_device_error as is_device_error,
    is_of_another_thread as is_of_another_thread,
    plain as plain,
    refused as refused,
)
from mlx_paged.ops.host import as_numpy as as_numpy
from mlx_paged.ops.layer_kv import LayerKV as LayerKV
from mlx_paged.ops.paged import (
    attend as attend,
    copy_blocks as copy_blocks,
    install_in_mlx as install_in_mlx,
    paged_attention as paged_attention,
    paged_attention_varlen as paged_attention_varlen,
    uninstall_from_mlx as uninstall_from_mlx,
    write_kv as write_kv,
)

hadamard = _ext.layers.hadamard
