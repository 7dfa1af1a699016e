"""How much memory the arrays of a step take at most, as the widths of a model's layers say."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_paged.runner.model_probe import ModelProfile

COPIES = 3  # arrays as wide as a linear layer's output that are made of it, that output included
SCORES = 4  # arrays of a row of logits in float32 that the sampler makes
LONG_PROMPT = 1 << 15  # tokens; a longer prompt takes more where its keys are gathered

IN_FLIGHT = 11
"""MLX waits while ten command buffers are under way; one more is encoded."""

ELEMENTS = 50 << 20
"""An op with which a command buffer's inputs have more elements is its last one."""


def step_bytes(model: nn.Module, profile: ModelProfile, chunk: int, max_running: int) -> int:
    """Bytes of the arrays that are alive at once while a step computes `chunk` tokens of prompts
    beside `max_running` sequences: all that the model makes, or what the command buffers that MLX
    allows to be under way bind."""
    rows, widths, vocab = chunk + max_running, 0, 0
    for name, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        weight = getattr(layer, "weight", None)
        if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding):
            vocab = max(vocab, layer.weight.shape[0])
        elif isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
            widths += _experts(model) * layer.weight.shape[1]
        elif isinstance(weight, mx.array) and weight.ndim == 2 and "head" not in name:
            widths += weight.shape[0]
    shapes = [shape for shape in profile.shapes if shape is not None]
    token_bytes = max((shape.token_bytes for shape in shapes), default=0)
    size = max((shape.dtype.size for shape in shapes), default=2)
    gathered = LONG_PROMPT * token_bytes
    everything = COPIES * size * rows * widths + len(shapes) * gathered
    under_way = IN_FLIGHT * (size * ELEMENTS + gathered)
    return min(everything, under_way) + 4 * SCORES * max_running * vocab


def _experts(model: nn.Module) -> int:
    """How many experts compute a token."""
    args: Any = getattr(model, "args", None)
    text = getattr(args, "text_config", None) or {}
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    found = (getattr(args, name, None) or dict(text).get(name) for name in names)
    return next((int(count) for count in found if count), 8)
