"""What no engine that computes every token goes below: the matrix products."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from bench.serving.trace import Trace


def gemm_flops(model: nn.Module, trace: Trace) -> float | None:
    """Operations of the weights' products: prompts once, outputs, logits for outputs only.

    None for a model with quantized weights.
    """
    weights = [(name, w) for name, w in tree_flatten(model.parameters()) if w.ndim == 2]
    if not all(mx.issubdtype(w.dtype, mx.floating) for _, w in weights):
        return None
    sizes = {name: w.size for name, w in weights}
    embedding = sum(size for name, size in sizes.items() if "embed_tokens" in name)
    head = sum(size for name, size in sizes.items() if "lm_head" in name)
    body = sum(sizes.values()) - embedding - head
    outputs = sum(job.output_tokens for job in trace)
    tokens = sum(len(job.prompt) for job in trace) + outputs
    return float(2 * (body * tokens + (head or embedding) * outputs))
