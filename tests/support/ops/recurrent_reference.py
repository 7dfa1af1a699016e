"""Recurrent layers in float64, token by token, and arrays for them."""

import mlx.core as mx
import numpy as np

from tests.support.ops.layer_cases import float64, random


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0.0)


def gated_delta(q, k, v, gates, betas, state=None, mask=None):
    """Outputs and the last state; arguments as of the op."""
    q, k, v, gates, betas = map(float64, (q, k, v, gates, betas))
    batch, tokens, heads, values = v.shape
    q, k = (np.repeat(each, heads // k.shape[2], axis=2) for each in (q, k))
    s = np.zeros((batch, heads, values, k.shape[3])) if state is None else float64(state)
    out = np.zeros_like(v)
    for t in range(tokens):
        gate = gates[:, t, :, None, None] if gates.ndim == 3 else gates[:, t, :, None]
        new = s * gate
        delta = (v[:, t] - np.einsum("bhvk,bhk->bhv", new, k[:, t])) * betas[:, t, :, None]
        new = new + np.einsum("bhv,bhk->bhvk", delta, k[:, t])
        kept = np.ones(batch, bool) if mask is None else np.array(mask)[:, t]
        s = np.where(kept[:, None, None, None], new, s)
        out[kept, t] = np.einsum("bhvk,bhk->bhv", new, q[:, t])[kept]
    return out, s


def state_space_scan(x, a_log, b, c, d, dt, dt_bias, state=None, mask=None, *, limits):
    """Outputs and the last state; arguments as of the op."""
    x, a_log, b, c, d, dt, dt_bias = map(float64, (x, a_log, b, c, d, dt, dt_bias))
    batch, tokens, heads, _ = x.shape
    b, c = (np.repeat(each, heads // b.shape[2], axis=2) for each in (b, c))
    steps = np.clip(softplus(dt + dt_bias), *limits)
    s = np.zeros((*x[:, 0].shape, b.shape[3])) if state is None else float64(state)
    out = np.zeros_like(x)
    for t in range(tokens):
        decay = np.exp(-steps[:, t] * np.exp(a_log))[..., None, None]
        new = s * decay + (steps[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        kept = np.ones(batch, bool) if mask is None else np.array(mask)[:, t]
        s = np.where(kept[:, None, None, None], new, s)
        y = np.einsum("bhdn,bhn->bhd", new, c[:, t]) + x[:, t] * d[:, None]
        out[kept, t] = y[kept]
    return out, s


def selective_scan(x, a_log, b, c, d, dt, state=None):
    """Outputs and the last state, which is not rounded between; arguments as of the op."""
    x, a_log, b, c, d, dt = map(float64, (x, a_log, b, c, d, dt))
    s = np.zeros((*x[:, 0].shape, b.shape[2])) if state is None else float64(state)
    out = np.zeros_like(x)
    for t in range(x.shape[1]):
        step = softplus(dt[:, t])[..., None]
        s = s * np.exp(-step * np.exp(a_log)) + step * x[:, t, :, None] * b[:, t, None]
        out[:, t] = np.einsum("bdn,bn->bd", s, c[:, t]) + x[:, t] * d
    return out, s


def convolution(x, weight, bias=None):
    x, weight = float64(x), float64(weight)[..., 0]
    taps = weight.shape[1]
    out = sum(x[:, k : x.shape[1] - taps + 1 + k] * weight[:, k] for k in range(taps))
    return out if bias is None else out + float64(bias)


def delta_arrays(
    dtype=mx.float32,
    *,
    batch=2,
    tokens=20,
    groups=2,
    heads=4,
    keys=48,
    values=37,
    has_vectors=False,
    has_state=True,
):
    """Arguments of the op, with keys and queries of a length about one."""
    q, k = (random(batch, tokens, groups, keys, scale=keys**-0.5, seed=i) for i in (1, 2))
    shape = (batch, tokens, heads, keys) if has_vectors else (batch, tokens, heads)
    gates = mx.exp(-mx.abs(random(*shape, seed=4)) / 4)
    state = random(batch, heads, values, keys, seed=6) if has_state else None
    v = random(batch, tokens, heads, values, seed=3)
    betas = mx.sigmoid(random(batch, tokens, heads, seed=5))
    return [q.astype(dtype), k.astype(dtype), v.astype(dtype), gates, betas.astype(dtype), state]


def scan_arrays(
    dtype=mx.float32, *, batch=2, tokens=20, groups=2, heads=4, dims=37, size=48, has_state=True
):
    """Arguments of the op."""
    b, c = (random(batch, tokens, groups, size, scale=size**-0.5, seed=i) for i in (2, 3))
    x = random(batch, tokens, heads, dims, seed=1)
    of_heads = [random(heads, seed=i) for i in (4, 5, 6)]
    dt = random(batch, tokens, heads, seed=7)
    state = random(batch, heads, dims, size, seed=8) if has_state else None
    a_log, d, bias = (each.astype(dtype) for each in of_heads)
    x, b, c, dt = (each.astype(dtype) for each in (x, b, c, dt))
    return [x, a_log, b, c, d, dt, bias, state]


def selective_arrays(dtype=mx.float32, *, batch=2, tokens=20, channels=71, size=16, has_state=True):
    """Arguments of the op."""
    b, c = (random(batch, tokens, size, scale=size**-0.5, seed=i) for i in (2, 3))
    x, dt = (random(batch, tokens, channels, seed=i) for i in (1, 4))
    a_log, d = random(channels, size, seed=5), random(channels, seed=6)
    state = random(batch, channels, size, seed=7) if has_state else None
    arrays = [x, a_log, b, c, d, dt, state]
    return [None if each is None else each.astype(dtype) for each in arrays]
