"""Random attention problems, as raw arrays for kernels and as float64 for the reference."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

ACCUMULATION_ERROR = 3e-6
"""What float32 accumulation may leave, relative."""


@dataclass(frozen=True, slots=True)
class Precision:
    """One element type under its names in MLX and in Metal."""

    name: str
    metal: str
    dtype: mx.Dtype
    unit_roundoff: float

    @property
    def tolerance(self) -> float:
        """Relative RMS error of results that are rounded once on the way and once at the end."""
        return self.unit_roundoff + ACCUMULATION_ERROR

    def array(self, values: NDArray[Any]) -> mx.array:
        return mx.array(values).astype(self.dtype)

    def __str__(self) -> str:
        return self.name


FLOAT32 = Precision("float32", "float", mx.float32, 0.0)
FLOAT16 = Precision("float16", "float16_t", mx.float16, 2**-11)
BFLOAT16 = Precision("bfloat16", "bfloat16_t", mx.bfloat16, 2**-8)
PRECISIONS = (FLOAT32, FLOAT16, BFLOAT16)


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes and options: H query heads on H_kv key heads, L queries on N keys."""

    precision: Precision
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int = 128
    causal: bool = False
    mask: str = ""  # "bool", "float" or none
    sinks: bool = False

    def __str__(self) -> str:
        text = f"{self.precision}-b{self.batch}-h{self.heads}:{self.kv_heads}"
        text += f"-l{self.queries}-n{self.keys}-d{self.head_dim}"
        options = [("causal", self.causal), (f"{self.mask}mask", self.mask), ("sinks", self.sinks)]
        return "-".join([text, *(name for name, is_on in options if is_on)])


class Problem:
    """The arrays of a case: q [B, H, L, D], k and v [B, H_kv, N, D], mask [B, H, L, N], sinks [H].

    `mask` is None or an array of bool or of the case's precision.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> mx.array:
            return case.precision.array(rng.standard_normal(shape, dtype=np.float32))

        self.case = case
        self.scale = case.head_dim**-0.5
        self.q = normal(case.batch, case.heads, case.queries, case.head_dim)
        self.k = normal(case.batch, case.kv_heads, case.keys, case.head_dim)
        self.v = normal(case.batch, case.kv_heads, case.keys, case.head_dim)
        scores = (case.batch, case.heads, case.queries, case.keys)
        self.mask: mx.array | None = None
        if case.mask == "bool":
            self.mask = mx.array(rng.random(scores) > 0.3)
        elif case.mask == "float":
            self.mask = normal(*scores)
        self.sinks = normal(case.heads) if case.sinks else None

    def by_mlx(self) -> NDArray[np.float64]:
        """[B, H, L, D] from mx.fast.scaled_dot_product_attention on the CPU."""
        mask = "causal" if self.case.causal else self.mask
        output = mx.fast.scaled_dot_product_attention(
            self.q, self.k, self.v, scale=self.scale, mask=mask, sinks=self.sinks, stream=mx.cpu
        )
        return np.asarray(to_float64(output))

    def in_float64(self) -> NDArray[np.float64]:
        """[B, H, L, D] of the same rounded inputs, without rounding after that."""
        case = self.case
        group = case.heads // case.kv_heads
        k, v = (np.repeat(to_float64(a), group, axis=1) for a in (self.k, self.v))
        scores = self.scale * to_float64(self.q) @ k.swapaxes(-1, -2)
        if case.causal:
            position = np.arange(case.queries)[:, None] + case.keys - case.queries
            scores = np.where(np.arange(case.keys) <= position, scores, -np.inf)
        if self.mask is not None:
            mask = to_float64(self.mask)
            scores = np.where(mask > 0, scores, -np.inf) if case.mask == "bool" else scores + mask
        if self.sinks is not None:  # one more score per row, whose value is zero
            column = np.broadcast_to(to_float64(self.sinks)[:, None, None], (*scores.shape[:3], 1))
            scores = np.concatenate([scores, column], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.asarray(weights[..., : case.keys] @ v)


def raw(array: mx.array) -> NDArray[Any]:
    """The elements as a kernel sees them; bfloat16 as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def nan_filled(shape: tuple[int, ...], precision: Precision) -> NDArray[Any]:
    """An output that no kernel has written yet, as raw elements."""
    return raw(mx.full(shape, mx.nan, dtype=precision.dtype))


def to_float64(array: mx.array | NDArray[Any], precision: Precision | None = None) -> Any:
    """An MLX array, or raw elements of `precision`."""
    if isinstance(array, np.ndarray) and precision is BFLOAT16:
        array = mx.array(array).view(mx.bfloat16)
    if isinstance(array, mx.array):
        array = np.array(array.astype(mx.float32))
    return array.astype(np.float64)


def relative_rms(actual: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Root mean square of the difference over that of what is expected; NaN stays NaN."""
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))
