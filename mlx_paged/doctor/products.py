"""Compares MLX's own products, attention and transforms with float64, at a model's sizes.

The first GPUs with matrix units in their cores (NAX) had a compiler that made wrong code for them.
Where MLX uses these units, the check runs a second time without them.
"""

import os

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.attention.paths import has_matrix_units
from mlx_paged.doctor import float64
from mlx_paged.doctor.apart import found_apart
from mlx_paged.doctor.findings import Findings

SIZES = 200, 2048, 8  # rows, widths of layers, heads
SIZES_ON_CPU = 16, 512, 2  # where MLX computes 4 bits some thousand times slower
HEAD_DIM, GROUP, BITS = 128, 64, 4
VARIABLE = "MLX_METAL_GPU_ARCH"  # the GPU for which MLX chooses its kernels
WITHOUT_UNITS = "applegpu_g16s"  # an M4 Max
TOLERANCES = {mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6}
"""Largest relative error of a row, where sums are float32. MLX's CPU backend sums 4 bits and
weights of attention in the dtype: there eight times as much is right."""
ON_CPU = 8


def check_products(found: Findings, quick: bool) -> None:
    """MLX's own products, attention and transforms against float64"""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    for dtype, of_sums in TOLERANCES.items():
        allowed = of_sums * (ON_CPU if on_cpu else 1)
        errors = errors_of(dtype, *(SIZES_ON_CPU if on_cpu else SIZES))
        found.numbers[str(dtype)] = errors
        text = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        found.lines.append(f"{dtype}: {text}; tolerance {allowed:.1e}")
        wrong = [name for name, error in errors.items() if not error <= allowed]
        found.num_wrong += len(wrong)
        found.failures += [
            f"MLX's {name} in {dtype} is wrong: {errors[name]:.2g}" for name in wrong
        ]
    if has_matrix_units() and VARIABLE not in os.environ:
        without = found_apart(Findings(found.name), quick, **{VARIABLE: WITHOUT_UNITS})
        found.numbers["without matrix units"] = without.numbers
        found.lines.append(
            f"with {VARIABLE}={WITHOUT_UNITS}, without matrix units: {without.state}"
        )


def errors_of(dtype: mx.Dtype, rows: int, width: int, heads: int) -> dict[str, float]:
    """The relative error of the worst row, by what computes it."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    def exact(array: mx.array) -> float64.Array:
        return np.array(array.astype(mx.float32)).astype(np.float64)

    x, weight = normal(rows, width), normal(width, width)
    packed = mx.quantize(weight, GROUP, BITS)
    unpacked = exact(mx.dequantize(*packed, GROUP, BITS))
    q, k, v = (normal(1, heads, rows, HEAD_DIM) for _ in range(3))
    scores = exact(q) @ exact(k).swapaxes(2, 3) * HEAD_DIM**-0.5
    scores += np.triu(np.full((rows, rows), -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = weights @ exact(v) / weights.sum(-1, keepdims=True)
    attend = mx.fast.scaled_dot_product_attention
    cases = {
        "product": (x @ weight.T, exact(x) @ exact(weight).T),
        "product of one row": (x[:1] @ weight.T, exact(x[:1]) @ exact(weight).T),
        f"product with {BITS} bits": (
            mx.quantized_matmul(x, *packed, group_size=GROUP, bits=BITS),
            exact(x) @ unpacked.T,
        ),
        "attention": (attend(q, k, v, scale=HEAD_DIM**-0.5, mask="causal"), attended),
        "Hadamard transform": (ops.hadamard(q), exact(q) @ hadamard_matrix(HEAD_DIM)),
    }
    return {name: float64.worst_row(exact(got), want, dtype) for name, (got, want) in cases.items()}


def hadamard_matrix(width: int) -> float64.Array:
    """The orthonormal Hadamard matrix of a power of two."""
    matrix = np.full((1, 1), width**-0.5)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
