"""What the layers of a model compute for a token, as the bound of a GPU's commands needs it."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_paged.command_buffers import most_elements
from mlx_paged.runner.model_probe import ModelProfile
from mlx_paged.runner.step_memory import experts
from mlx_paged.scheduler.command_bound import CommandBound


def command_bound(model: nn.Module, profile: ModelProfile) -> CommandBound:
    """The bound of a model's command buffers. Each layer counts as the mean of all layers."""
    products, stored, widths = [0.0], 0, 0
    for name, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, mx.array) or weight.ndim < 2:
            continue
        if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding) or "head" in name:
            continue
        count = experts(model) if isinstance(layer, SwitchLinear | QuantizedSwitchLinear) else 1
        packed = 32 // layer.bits if weight.dtype == mx.uint32 else 1
        products.append(count * weight.shape[-2] * weight.shape[-1] * packed)
        stored += weight.size
        widths += count * weight.shape[-2]
    layers = max(1, len(profile.shapes))
    kinds = [(k.num_heads, k.shape.head_dim + k.shape.v_head_dim) for k in profile.attentions]
    return CommandBound(
        layers=layers,
        weights=sum(products) / layers,
        largest=max(products),
        pair=max((2.0 * heads * dims for heads, dims in kinds), default=0.0),
        stored=stored / layers,
        widths=widths / layers,
        buffer=most_elements(),
    )
