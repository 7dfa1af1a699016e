"""Types of the compiled ops; mlx_paged/ops/paged.py and python/bindings.cpp document them."""

from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_Array = TypeVar("_Array", bound=mx.array)
_Stream = mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None

BUILT_WITH: dict[str, str]
"""By package: the version whose headers the module was compiled with."""

def paged_attention(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    *,
    scale: float,
    causal: bool = True,
    kv_head_mapping: mx.array | None = None,
    rope_freqs: mx.array | None = None,
    attn_mask: mx.array | None = None,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    alibi_slopes: mx.array | None = None,
    return_attn: bool = False,
    k_scales: mx.array | None = None,
    v_scales: mx.array | None = None,
    cu_seqlens: mx.array | None = None,
    num_decodes: int = 0,
    check_tables: bool = False,
    stream: _Stream = None,
) -> mx.array | Any: ...  # the pair with return_attn
def write_kv(
    k: mx.array,
    v: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    slot_mapping: mx.array,
    *,
    k_scales: mx.array | None = None,
    v_scales: mx.array | None = None,
    stream: _Stream = None,
) -> list[mx.array]: ...
def copy_blocks(
    k_cache: mx.array, v_cache: mx.array, block_pairs: mx.array, *, stream: _Stream = None
) -> tuple[mx.array, mx.array]: ...
def gather_blocks(cache: mx.array, block_tables: mx.array, num_tokens: int) -> mx.array: ...
def append_kv(
    kind: type[_Array],
    k: mx.array,
    v: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    slot_mapping: mx.array,
    block_tables: mx.array,
    num_tokens: int,
    held: mx.array | None = None,
) -> tuple[mx.array, mx.array, _Array, _Array] | None: ...
def padded_arrays(
    starts: Sequence[int],
    lengths: Sequence[int],
    columns: int,
    tables: npt.NDArray[np.int32],
    rows: Sequence[int],
    block_size: int,
) -> list[mx.array]: ...
def take_from_pool(rows: mx.array, indices: mx.array) -> mx.array: ...
def pool_zeros(
    shape: Sequence[int], dtype: mx.Dtype, *, capacity: int = 0, stream: _Stream = None
) -> mx.array: ...
def grown_in_place(
    blocks: mx.array, num_blocks: int, *, stream: _Stream = None
) -> mx.array | None: ...
def reserved_bytes() -> int: ...
def is_transforming() -> bool: ...
def set_fusion(fuses: bool) -> None: ...
def has_values(array: mx.array) -> bool: ...
def view_as(kind: type[_Array], array: mx.array) -> _Array: ...
def cpu_features() -> str: ...
def supported_kernels() -> list[str]: ...
def num_threads() -> int: ...

class layers:
    """The submodule of a model's layers, for CPUs; python/layer_bindings.cpp documents them."""

    @staticmethod
    def rms_norm(
        x: mx.array, weight: mx.array | None, eps: float, *, stream: _Stream = None
    ) -> mx.array: ...
    @staticmethod
    def rope(
        x: mx.array,
        offset: int | mx.array,
        frequencies: mx.array,
        *,
        scale: float = 1.0,
        traditional: bool = False,
        stream: _Stream = None,
    ) -> mx.array: ...
    @staticmethod
    def rope_frequencies(dims: int, base: float, *, stream: _Stream = None) -> mx.array: ...
    @staticmethod
    def silu(
        x: mx.array, factor: mx.array | None = None, *, stream: _Stream = None
    ) -> mx.array: ...
    @staticmethod
    def gelu_approx(
        x: mx.array, factor: mx.array | None = None, *, stream: _Stream = None
    ) -> mx.array: ...
    @staticmethod
    def linear(x: mx.array, weight: mx.array, *, stream: _Stream = None) -> mx.array: ...
    @staticmethod
    def log_sum_exp(x: mx.array, *, stream: _Stream = None) -> mx.array: ...

class metal:
    """The submodule of launch plans; a call is a dict, see its documentation."""

    MOST_ROWS: int
    @staticmethod
    def has_metal() -> bool: ...
    @staticmethod
    def unsupported(head_dim: int, value_dim: int) -> str: ...
    @staticmethod
    def serves_chunks(dtype: mx.Dtype, head_dim: int, value_dim: int) -> bool: ...
    @staticmethod
    def plan_attention(*arrays: mx.array, **options: Any) -> dict[str, Any]:
        """The arguments are those of :func:`paged_attention`, but for the last two."""
    @staticmethod
    def plan_write_kv(*arrays: mx.array, **scales: mx.array) -> dict[str, Any]:
        """The arguments are those of :func:`write_kv` without `stream`."""
    @staticmethod
    def plan_copy_blocks(*arrays: mx.array) -> dict[str, Any]:
        """The arguments are those of :func:`copy_blocks` without `stream`."""
