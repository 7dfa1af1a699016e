"""Random cases of paged attention: shuffled tables, and NaN wherever nothing may read."""

import gc
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext, ops
from mlx_paged.ops import dispatch
from tests.support.devices import CPU_SUMS, ROUNDOFF, is_gpu, tolerance
from tests.support.ops.numpy_reference import paged_attention_numpy

LAYOUTS = {"HNSD": (0, 1, 2, 3), "NHSD": (1, 0, 2, 3), "NSHD": (1, 2, 0, 3)}
"""Physical orders of a pool, as axes of the logical ``[H_kv, N, S, D]``."""

FLOAT32_ERROR = CPU_SUMS
TOLERANCE = {dtype: roundoff + CPU_SUMS for dtype, roundoff in ROUNDOFF.items()}
"""Of a CPU and of the emulator, by output dtype; :func:`tolerance` has that of the device."""


@dataclass
class Case:
    """Arguments of one call on one layer's pool."""

    q: mx.array
    k_cache: mx.array
    v_cache: mx.array
    block_tables: mx.array
    context_lens: mx.array
    options: dict[str, Any]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.context_lens

    @property
    def block_size(self) -> int:
        return self.k_cache.shape[2]

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Output and softmax weights in float64."""
        options = {
            name: as_numpy(value) if isinstance(value, mx.array) else value
            for name, value in {"scale": self.scale, **self.options}.items()
        }
        return paged_attention_numpy(
            *(as_numpy(a) for a in self.arrays), **options, return_attn=True
        )


def random_case(
    contexts: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    block_size: int = 16,
    num_tokens: int = 1,
    dtype: mx.Dtype = mx.float32,
    q_dtype: mx.Dtype | None = None,
    layout: str = "NHSD",
    options: Iterable[str] = (),
    spare_columns: int = 1,
    seed: int = 0,
) -> Case:
    """Sequences with these context lengths; every slot that they do not use is NaN.

    Table entries past a context are ids of poisoned blocks and ids outside the pool. `options`
    names the entries of `OPTIONS` to add. Tables have `spare_columns` more than the longest
    context needs.
    """
    rng = np.random.default_rng(seed)
    num_used = [-(-context // block_size) for context in contexts]
    max_blocks = max(num_used, default=0) + spare_columns
    num_blocks = sum(num_used) + 3
    free = list(rng.permutation(num_blocks))
    tables = np.empty((len(contexts), max_blocks), np.int32)
    k_pool = np.full((num_kv_heads, num_blocks, block_size, head_dim), np.nan)
    v_pool = np.full((num_kv_heads, num_blocks, block_size, v_head_dim or head_dim), np.nan)
    for table, used, context in zip(tables, num_used, contexts, strict=True):
        table[:used] = [free.pop() for _ in range(used)]
        table[used:] = rng.choice([free[0], -1, num_blocks, 2**31 - 1], max_blocks - used)
        for position in range(context):
            block, offset = table[position // block_size], position % block_size
            k_pool[:, block, offset] = rng.standard_normal((num_kv_heads, head_dim))
            v_pool[:, block, offset] = rng.standard_normal((num_kv_heads, v_pool.shape[3]))
    q = rng.standard_normal((len(contexts), num_heads, num_tokens, head_dim))
    case = Case(
        mx.array(q).astype(q_dtype or dtype),
        with_layout(mx.array(k_pool).astype(dtype), layout),
        with_layout(mx.array(v_pool).astype(dtype), layout),
        mx.array(tables),
        mx.array(np.array(contexts, np.int32)),
        {},
    )
    for name in options:
        case.options |= OPTIONS[name](rng, case)
    return case


def latent_case(
    contexts: Sequence[int], rank: int, rope: int, *, num_blocks: int = 0, **options: Any
) -> Case:
    """The same with one KV head whose values are the first `rank` columns of the keys: the same
    memory. The pool has `num_blocks` at least."""
    sizes = {"head_dim": rank + rope, "v_head_dim": 1}
    case = random_case(contexts, num_kv_heads=1, **sizes, **options)
    missing = num_blocks - case.k_cache.shape[1]
    if missing > 0:
        spare = mx.full((1, missing, *case.k_cache.shape[2:]), mx.nan, case.k_cache.dtype)
        case.k_cache = with_layout(mx.concatenate([case.k_cache, spare], axis=1), "NHSD")
    case.v_cache = case.k_cache[..., :rank]
    return case


def with_layout(pool: mx.array, layout: str) -> mx.array:
    """The same logical ``[H_kv, N, S, D]`` array in another physical order."""
    order = LAYOUTS[layout]
    physical = mx.contiguous(pool.transpose(order))
    mx.eval(physical)
    return physical.transpose(*np.argsort(order).tolist())


def as_numpy(a: mx.array) -> np.ndarray:
    """Floats as float64, everything else as it is."""
    if mx.issubdtype(a.dtype, mx.floating):
        return np.array(a.astype(mx.float32)).astype(np.float64)
    return np.array(a)


def worst_error(got: mx.array, want: np.ndarray) -> float:
    """Largest relative error, in norm, of a row (the last axis); zero rows must be exact.

    In the norm that divides, an element counts as the smallest normal number of the dtype at least:
    a smaller number is rounded as far as this one.
    """
    actual = as_numpy(got)
    assert actual.shape == want.shape
    assert np.isfinite(actual).all(), "poison was read"
    norm = np.linalg.norm(np.maximum(abs(want), mx.finfo(got.dtype).smallest_normal), axis=-1)
    error = np.linalg.norm(actual - want, axis=-1)
    is_zero = (want == 0).all(axis=-1)
    assert (error[is_zero] == 0).all(), "a query without keys did not yield zeros"
    return float((error[~is_zero] / norm[~is_zero]).max(initial=0))


def attend(case: Case, kernel: str = "native", **overrides: Any) -> tuple[mx.array, mx.array]:
    """Output and weights of the public op, after asserting which kernel answers. Skips a test of a
    kernel on a GPU that has none for these head dimensions."""
    require_kernel(kernel, case.k_cache.shape[3], case.v_cache.shape[3])
    q, k_cache, v_cache, tables, lens = case.arrays
    arguments = {**case.options, **overrides, "return_attn": True}
    out, attn = ops.paged_attention(q, [k_cache], [v_cache], tables, lens, **arguments)
    has_keys = 0 not in (k_cache.shape[1], *tables.shape)
    assert ("PagedAttention" in primitives(out)) == (kernel == "native" and has_keys)
    return out, attn


def assert_matches_float64(case: Case, kernel: str = "native", **overrides: Any) -> None:
    """Output and weights are right, and the output is the same without weights. Skips as
    :func:`attend`."""
    require_kernel(kernel, case.k_cache.shape[3], case.v_cache.shape[3])
    q, k_cache, v_cache, tables, lens = case.arrays
    options = {**case.options, **overrides}
    alone = ops.paged_attention(q, [k_cache], [v_cache], tables, lens, **options)
    out, attn = attend(case, kernel, **overrides)
    want, want_attn = case.expected()
    assert out.dtype == q.dtype and attn.dtype == mx.float32
    assert worst_error(out, want) < tolerance(out.dtype, kernel)
    assert worst_error(attn, want_attn) < tolerance(mx.float32, kernel)
    assert mx.array_equal(alone, out)


def require_kernel(kernel: str, *dims: int) -> None:
    """Skip a test of a compiled kernel that the GPU does not have for these head dimensions."""
    if kernel == "native" and is_gpu() and (why := _ext.metal.unsupported(*dims)):
        pytest.skip(f"the Metal kernels do not take {why}")


def primitives(*arrays: mx.array) -> str:
    """The graph that computes these arrays, as text that names every primitive."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue()


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Fails if the enclosed code ever holds this much more memory than before it."""
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    yield
    mx.synchronize()
    grown = max(mx.get_peak_memory(), mx.get_active_memory()) - before
    assert grown < num_bytes, f"{grown} bytes more, expected less than {num_bytes}"


def _mask(rng: np.random.Generator, case: Case) -> np.ndarray:
    """True for 7 keys in 10, and for none that the first query of the last sequence sees."""
    batch, num_heads, num_tokens, _ = case.q.shape
    num_keys = case.block_tables.shape[1] * case.block_size
    mask = rng.random((batch, num_heads, num_tokens, num_keys)) < 0.7
    mask[-1:, :, :1] = False
    return mask


def _float_mask(rng: np.random.Generator, case: Case) -> mx.array:
    mask = _mask(rng, case)
    return mx.array(np.where(mask, rng.standard_normal(mask.shape), -np.inf).astype(np.float32))


def _angles(rng: np.random.Generator, case: Case, num_angles: int) -> mx.array:
    """Angles as large as positions are."""
    shape = (case.q.shape[0], case.q.shape[2], num_angles)
    return mx.array(rng.uniform(0, 5000, shape).astype(np.float32))


def _per_head(rng: np.random.Generator, case: Case) -> mx.array:
    return mx.array(rng.standard_normal(case.q.shape[1]).astype(np.float32))


def _mapping(rng: np.random.Generator, case: Case) -> mx.array:
    kv_heads = rng.integers(0, case.k_cache.shape[0], case.q.shape[1])
    return mx.array(kv_heads.astype(np.int32))


OPTIONS = {
    "non_causal": lambda rng, case: {"causal": False},
    "window_1": lambda rng, case: {"window": 1},
    "window_s": lambda rng, case: {"window": case.block_size},
    "window_21": lambda rng, case: {"window": 21},
    "window_750": lambda rng, case: {"window": 750},  # more keys than a call without splits has
    "window_large": lambda rng, case: {"window": 10**6},
    "non_causal_window": lambda rng, case: {"causal": False, "window": 21},
    "sinks": lambda rng, case: {"sinks": 1.5 * _per_head(rng, case)},
    "softcap": lambda rng, case: {"softcap": 0.7},
    "softcap_50": lambda rng, case: {"softcap": 50.0},
    "alibi": lambda rng, case: {"alibi_slopes": mx.abs(_per_head(rng, case)) * 0.3},
    "bool_mask": lambda rng, case: {"attn_mask": mx.array(_mask(rng, case))},
    "float_mask": lambda rng, case: {"attn_mask": _float_mask(rng, case)},
    "rope": lambda rng, case: {"rope_freqs": _angles(rng, case, case.q.shape[3] // 2)},
    "partial_rope": lambda rng, case: {"rope_freqs": _angles(rng, case, case.q.shape[3] // 8)},
    "mapping": lambda rng, case: {"kv_head_mapping": _mapping(rng, case)},
}
"""Arguments by name, for a case that has none of them yet."""

MANY_OPTIONS = ("window_21", "sinks", "softcap", "alibi", "float_mask", "partial_rope", "mapping")


def answer_by(monkeypatch: Any, kernel_for: Callable[..., str]) -> None:
    """Let `kernel_for` say which kernel answers, for the ops and for whoever asks them."""
    monkeypatch.setattr(ops, "kernel_for", kernel_for)
    monkeypatch.setattr(dispatch, "kernel_for", kernel_for)


def hide_blocks(case: Case) -> None:
    """Put ids outside the pool into the tables of two sequences of 45 tokens, in blocks of 8."""
    tables = np.array(case.block_tables)
    tables[0, [0, 2]] = -1, -(2**31)
    tables[1, [1, 5]] = case.k_cache.shape[1], 2**31 - 1
    case.block_tables = mx.array(tables)


def leave_range(case: Case) -> None:
    """Give two sequences tables and contexts of which nothing may be read."""
    case.block_tables = mx.array(np.full(case.block_tables.shape, 2**31 - 1, np.int32))
    case.context_lens = mx.array([2**31 - 1, -5])
