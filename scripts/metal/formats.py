"""What compilers make of the decode kernel for each type of queries and of the pool.

A part of scripts.metal.counts. The figures of the second compiler are kept here by hand.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import mlx.core as mx

from mlx_paged import _ext
from tests.metal_emulator import gpu_code

TITLE = "Types of queries and pools"
FITTING = 8
"""Simdgroups of a scheduler of RDNA 2 that leave a lane 128 registers, as many as Apple's has."""
TYPES = (("float16", mx.float16, False), ("bfloat16", mx.bfloat16, False))
TYPES += (("float16, 8 bits", mx.float16, True), ("bfloat16, 8 bits", mx.bfloat16, True))
SHAPES = tuple(product((64, 128), (1, 4))) + ((256, 1), (256, 2))
"""Head dimensions, and the query heads of a group that a threadgroup of this kernel takes."""


@dataclass(frozen=True, slots=True)
class Second:
    """What Mesa's compiler makes of a kernel: registers that a lane needs, how many of them it
    stores and loads where it has 128, and cycles of a scheduler for a tile."""

    registers: float
    stores: int
    loads: int
    cycles: int


SECOND: dict[tuple[str, int, int], Second] = {}


def plan(dtype: mx.Dtype, is_quantized: bool, dim: int, group: int) -> dict[str, object]:
    """The launch of a decode over a context that is split."""
    shape = 8, 1, 16, dim
    pools = [mx.zeros(shape, mx.int8 if is_quantized else dtype) for _ in range(2)]
    scales = {f"{name}_scales": mx.zeros((8, 1, 16, 1), mx.float16) for name in "kv"}
    call = _ext.metal.plan_attention(
        mx.zeros((1, 8 * group, 1, dim), dtype),
        *pools,
        mx.zeros((1, 64), mx.int32),
        mx.ones((1,), mx.int32),
        scale=1.0,
        **(scales if is_quantized else {}),
    )
    return dict(call["launches"][0])
