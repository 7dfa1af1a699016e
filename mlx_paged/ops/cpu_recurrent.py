"""Recurrent layers of mlx-lm's models as one op each on a CPU (docs/cpu-recurrent.md).

On CPUs mlx-lm computes the gated delta rule and Mamba token by token and Mamba 2 by products of
chunks, in many passes over memory on one thread. The ops of :mod:`mlx_paged._ext.recurrent` replace
these functions, each by name. A function whose parameters are not those that this file knows stays
mlx-lm's, and so do arrays that an op does not take.
"""

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta, jamba, mamba, ssm

from mlx_paged import _ext

VARIABLE = "MLX_PAGED_CPU_RECURRENT"  # 0: recurrent layers are mlx-lm's; 1: on macOS, too

_DTYPES = frozenset((mx.float32, mx.float16, mx.bfloat16))
_STATE_LIMITS = (0.001, 100.0)

Function = Callable[..., Any]
Pair = tuple[mx.array, mx.array]


class Known(NamedTuple):
    """A function of mlx-lm that an op replaces.

    Attributes:
        owner: the module or class that has the function.
        name: its name there.
        parameters: the names of its parameters, in order.
        replacement: computes the same by an op; calls the original for arrays that the op does not
            take.
        marker: a name in the modules whose layers call it.
    """

    owner: Any
    name: str
    parameters: str
    replacement: Function
    marker: str

    @property
    def original(self) -> Function:
        """The function that mlx-lm has."""
        return _original(self.owner, self.name)

    @property
    def is_as_known(self) -> bool:
        """Whether mlx-lm's function has these parameters."""
        return " ".join(inspect.signature(self.original).parameters) == self.parameters


def _original(owner: Any, name: str) -> Function:
    found: Function = _originals[owner, name]
    return found


def _are_of(dtype: mx.Dtype, *arrays: mx.array | None) -> bool:
    return dtype in _DTYPES and all([a is None or a.dtype == dtype for a in arrays])


def _takes(mask: mx.array | None) -> bool:
    return mask is None or (mask.dtype == mx.bool_ and mask.ndim == 2)


def _gated_delta_ops(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> Pair:
    fits = _are_of(q.dtype, k, v) and beta.dtype in _DTYPES and _are_of(mx.float32, g, state)
    if not fits or not q.size or not _takes(mask):
        known: Pair = _original(gated_delta, "gated_delta_ops")(q, k, v, g, beta, state, mask)
        return known
    return _ext.recurrent.gated_delta(q, k, v, g, beta, state, mask)


def _ssm_attn(
    x: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = _STATE_LIMITS,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    step: int = 256,
) -> Pair:
    fits = _are_of(x.dtype, B, C) and D.dtype in (x.dtype, mx.float32)
    fits = fits and {A_log.dtype, dt.dtype, dt_bias.dtype} <= _DTYPES
    fits = fits and _are_of(mx.float32, state) and x.size > 0
    if not fits or not _takes(mask) or (lengths is not None and mask is None):
        known: Pair = _original(ssm, "ssm_attn")(
            x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths, step
        )
        return known
    return _ext.recurrent.state_space_scan(
        x, A_log, B, C, D, dt, dt_bias, state, mask, limits=time_step_limit
    )


def _settings_of(convolution: nn.Module) -> dict[str, Any]:
    """The settings of a convolution, those that a later mlx adds included, but not its groups."""
    own = vars(convolution).items()
    return {name: value for name, value in own if name[0] != "_" and name != "groups"}


_PLAIN = _settings_of(nn.Conv1d(1, 1, 1))


def _convolution(layer: Any, x: mx.array) -> mx.array:
    weight, bias = layer["weight"], layer.get("bias")
    fits = x.ndim == 3 and x.shape[1] >= weight.shape[1] and len(x) > 0
    is_depthwise = layer.groups == x.shape[-1] == weight.shape[0] and weight.shape[2] == 1
    is_plain = _settings_of(layer) == _PLAIN
    if not (fits and is_depthwise and is_plain and _are_of(x.dtype, weight, bias)):
        known: mx.array = _original(nn.Conv1d, "__call__")(layer, x)
        return known
    return _ext.recurrent.depthwise_convolution(x, weight, bias)


def _mamba_scan(mixer: Any, x: mx.array, state: mx.array | None) -> Pair | None:
    """The outputs and the last state of a mixer for ``x [B, T, D]``, which has been convolved; None
    if the op does not take its arrays."""
    projected, size = mixer.x_proj(x), mixer.ssm_state_size
    delta, b, c = mx.split(projected, [projected.shape[-1] - 2 * size, -size], axis=-1)
    if isinstance(mixer, jamba.JambaMambaMixer):
        delta, b, c = mixer.dt_layernorm(delta), mixer.b_layernorm(b), mixer.c_layernorm(c)
    elif mixer.use_bcdt_rms:
        eps = mixer.args.mixer_rms_eps
        delta, b, c = [mx.fast.rms_norm(each, None, eps) for each in (delta, b, c)]
    dt = mixer.dt_proj(delta)
    fits = _are_of(x.dtype, mixer.A_log, b, c, mixer.D, dt, state)
    if not fits or not x.size:
        return None
    return _ext.recurrent.selective_scan(x, mixer.A_log, b, c, mixer.D, dt, state)


def _mamba_sequence(
    mixer: Any, x: mx.array, conv_cache: mx.array | None, state_cache: mx.array | None
) -> tuple[mx.array, Pair]:
    kept = mixer.conv_kernel_size - 1
    inner, gate = mx.split(mixer.in_proj(x), 2, axis=-1)
    before = conv_cache
    if before is None:
        before = mx.zeros((len(inner), kept, inner.shape[-1]), inner.dtype)
    whole = mx.concatenate([before, inner], axis=1)
    found = _mamba_scan(mixer, nn.silu(mixer.conv1d(whole)), state_cache)
    if found is None:
        original = _original(mamba.MambaBlock, "_process_sequence")
        known: tuple[mx.array, Pair] = original(mixer, x, conv_cache, state_cache)
        return known
    y, state = found
    return mixer.out_proj(mamba.swiglu(gate, y)), (whole[:, -kept:], state)


def _jamba_step(
    mixer: Any,
    x: mx.array,
    A: mx.array,
    state: mx.array | None = None,
) -> Pair:
    found = _mamba_scan(mixer, x, state)
    if found is None:
        found = _original(jamba.JambaMambaMixer, "ssm_step")(mixer, x, A, state)
    return found


_DELTA = "q k v g beta state mask"
_SCAN = "x A_log B C D dt dt_bias state time_step_limit mask lengths step"

KNOWN = (
    Known(gated_delta, "gated_delta_ops", _DELTA, _gated_delta_ops, "gated_delta_update"),
    Known(ssm, "ssm_attn", _SCAN, _ssm_attn, "ssm_update"),
    Known(nn.Conv1d, "__call__", "self x", _convolution, "Conv1d"),
    Known(
        mamba.MambaBlock,
        "_process_sequence",
        "self x conv_cache state_cache",
        _mamba_sequence,
        "MambaBlock",
    ),
    Known(jamba.JambaMambaMixer, "ssm_step", "self x A state", _jamba_step, "JambaMambaMixer"),
)
"""The functions of mlx-lm that an op replaces."""

_originals: dict[tuple[Any, str], Function] = {
    (known.owner, known.name): getattr(known.owner, known.name) for known in KNOWN
}


def functions_of(model: nn.Module) -> list[Known]:
    """The functions that a model may call and that an op replaces. An empty list if `VARIABLE` is
    0, and on macOS unless it is set to something else."""
    if os.environ.get(VARIABLE, "0" if sys.platform == "darwin" else "1") == "0":
        return []
    modules = {type(layer).__module__ for layer in model.modules()}
    names = {name for each in modules for name in vars(sys.modules.get(each, object))}
    return [known for known in KNOWN if known.marker in names and known.is_as_known]
