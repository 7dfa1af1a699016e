"""What benches run on: models of Llama's shape with random weights, and a machine with limits."""

import os
import sys
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama

from mlx_paged.common_args import number

AT_LEAST_TWO = number(int, 2, 2**31, "a whole number >= 2")
"""An argument type, beside those of mlx_paged.common_args."""

REFERENCE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}

SIZES: dict[str, dict[str, Any]] = {
    "reference": REFERENCE,
    "many-kv-heads": REFERENCE | {"num_key_value_heads": 8},
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128,
    },
}
"""By name: "reference" is what published numbers are measured with, "many-kv-heads" the same with
four times the K/V (16 KiB a token), "tiny" tests a bench."""

GEMM_SIZE = 512
SLOW_GFLOPS = 20.0
"""A reference BLAS reaches about 4 on one core, an optimised one 50 or more."""


def llama_model(size: str = "reference", seed: int = 0) -> nn.Module:
    """A Llama with random float32 weights; `size` is a key of :data:`SIZES`."""
    mx.random.seed(seed)
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    model = llama.Model(llama.ModelArgs.from_dict(config | SIZES[size]))
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def random_prompts(num_prompts: int, num_tokens: int, size: str, seed: int = 0) -> list[list[int]]:
    """Token ids below the vocabulary of `size`, ``[num_prompts][num_tokens]``."""
    ids = np.random.default_rng(seed).integers(
        SIZES[size]["vocab_size"], size=(num_prompts, num_tokens)
    )
    return [row.tolist() for row in ids]


def gemm_gflops(size: int = GEMM_SIZE, repeats: int = 3) -> float:
    """Speed of a square float32 matrix product: the best of several, in GFLOP/s."""
    a, b = mx.random.normal((2, size, size))
    mx.eval(a, b)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(a @ b)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def check_machine() -> dict[str, float]:
    """Measure what times depend on; a line on stderr for whatever makes them say little.

    Returns:
        "gemm_gflops", of float32, and "load_average", of the last minute.
    """
    gflops, load, num_cores = gemm_gflops(), os.getloadavg()[0], os.cpu_count() or 1
    if gflops < SLOW_GFLOPS:
        print(
            f"slow BLAS: float32 GEMM at {gflops:.1f} GFLOP/s; on Linux preload OpenBLAS "
            "(LD_PRELOAD=.../libopenblas.so.0)",
            file=sys.stderr,
        )
    if load > num_cores / 2:
        print(
            f"busy machine: load average {load:.1f} on {num_cores} cores; gaps include the time"
            " that other processes take",
            file=sys.stderr,
        )
    return {"gemm_gflops": round(gflops, 1), "load_average": round(load, 2)}
