"""Types of the compiled ops; mlx_paged/ops/paged.py and python/bindings.cpp document them."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_Array = TypeVar("_Array", bound=mx.array)
_Keys = TypeVar("_Keys", bound=mx.array)
_Values = TypeVar("_Values", bound=mx.array)
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
    shared_prefixes: mx.array | None = None,
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
def gather_blocks(
    cache: mx.array,
    block_tables: mx.array,
    num_tokens: int,
    head_runs: mx.array | None = None,
    *,
    stream: _Stream = None,
) -> mx.array: ...

class ForwardArrays:
    """What the layers of one forward read; csrc/layer_calls.h documents it."""

    slot_mapping: mx.array | None
    block_tables: mx.array
    context_lens: mx.array
    row_tables: mx.array
    max_context: int
    def __init__(
        self,
        slot_mapping: mx.array | None,
        block_tables: mx.array,
        context_lens: mx.array,
        shared_prefixes: mx.array | None,
        row_tables: mx.array,
        max_context: int,
        held: mx.array | None,
    ) -> None: ...

class KnownWrite:
    """A kind of write that the device has a kernel for."""

    def __init__(self, dtype: mx.Dtype, rotates: bool) -> None: ...

class KnownAttention:
    """A kind of attention that the device has a kernel for."""

    window: int | None
    shares: bool
    def __init__(self, q: mx.array, window: int | None, shares: bool, rotates: bool) -> None: ...

def append_kv(
    keys_kind: type[_Keys],
    values_kind: type[_Values],
    cache: object,
    k: mx.array,
    v: mx.array,
    stored: list[list[mx.array]],
    layer: int,
    forward: ForwardArrays,
    known: KnownWrite,
) -> tuple[_Keys, _Values] | None: ...
def attend_known(
    q: mx.array,
    stored: list[list[mx.array]],
    layer: int,
    forward: ForwardArrays,
    known: KnownAttention,
    scale: float,
) -> mx.array | None: ...
def dequantized(
    cache: mx.array, scales: mx.array, dtype: mx.Dtype, *, stream: _Stream = None
) -> mx.array: ...
def decode_arrays(
    starts: Sequence[int], tables: npt.NDArray[np.int32], rows: int, block_size: int
) -> list[mx.array]: ...
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
def clear_compiled() -> None: ...
def are_one(a: mx.array, b: mx.array) -> bool: ...
def has_values(array: mx.array) -> bool: ...
def arrays_in(tree: Any) -> tuple[list[mx.array], int]: ...
def with_arrays(tree: Any, arrays: list[mx.array]) -> Any: ...
def without_values(arrays: list[mx.array]) -> list[mx.array]: ...
def keep_compiled(inputs: list[mx.array]) -> None: ...
def view_as(kind: type[_Array], array: mx.array) -> _Array: ...
def cpu_features() -> str: ...
def supported_kernels() -> list[str]: ...
def num_threads() -> int: ...

class Tape:
    """A graph that is built again for other inputs; python/graph_bindings.cpp documents it."""

    num_nodes: int
    names: list[str]
    def __init__(
        self, inputs: list[mx.array], results: Any, elsewhere: list[mx.array], groups: bool = False
    ) -> None: ...
    def __call__(self, inputs: list[mx.array]) -> Any: ...  # None, or a tree like `results`

class layers:
    """The submodule of a model's layers, for CPUs; python/layer_bindings.cpp documents them."""

    rms_norm: Callable[..., mx.array]
    rope: Callable[..., mx.array]
    silu: Callable[..., mx.array]
    gelu_approx: Callable[..., mx.array]
    likeliest: Callable[..., mx.array]
    mask: Callable[..., mx.array]
    hadamard: Callable[..., mx.array]
    linear: Callable[..., mx.array]
    quantized_linear: Callable[..., mx.array]
    switch_linear: Callable[..., mx.array]
    low_rank_terms: Callable[..., mx.array]
    read_factors: Callable[..., tuple[mx.array, list[mx.array], int]]
    write_slot: Callable[[list[mx.array], list[mx.array | None], int], None]
    is_dense: Callable[[mx.array], bool]

class recurrent:
    """The submodule of recurrent layers, for CPUs; python/recurrent_bindings.cpp documents them."""

    gated_delta: Callable[..., tuple[mx.array, mx.array]]
    state_space_scan: Callable[..., tuple[mx.array, mx.array]]
    selective_scan: Callable[..., tuple[mx.array, mx.array]]
    depthwise_convolution: Callable[..., mx.array]

class metal:
    """The submodule of launch plans; a call is a dict, see its documentation. Functions that plan
    take the arguments of the functions of this module, but no stream."""

    MOST_ROWS: int
    has_metal: Callable[[], bool]
    unsupported: Callable[[int, int], str]
    serves_chunks: Callable[[mx.Dtype, int, int], bool]
    end_of_work: Callable[[], Callable[[], None] | None]
    num_command_buffers: Callable[[], int]
    refusal: Callable[[dict[str, Any]], str]
    note_refused: Callable[[str], None]
    forget_refused: Callable[[], None]
    use_simplest_forms: Callable[[bool], None]
    plan_attention: Callable[..., dict[str, Any]]
    plan_write_kv: Callable[..., dict[str, Any]]
    plan_copy_blocks: Callable[..., dict[str, Any]]
