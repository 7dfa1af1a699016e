"""Operations of a model's layers for a token, from their shapes."""

from collections import Counter
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_paged.attention.causal import limits
from mlx_paged.kv.worth import Pairs, Work
from mlx_paged.runner.hosted_model import HostedModel
from mlx_paged.runner.model_probe import ModelProfile
from mlx_paged.runner.step_memory import experts

OF_STATE = 6
"""Operations for an element of a recurrent state and a token: a product and a sum each to let it
fade, to add to it and to read it."""


def text_work(model: nn.Module, profile: ModelProfile) -> Work:
    """The operations of a model for the tokens of a prompt: two for each weight that multiplies a
    token, those of attention, and :data:`OF_STATE` for each element of recurrent states. The output
    projection is not among them: a prompt needs it for one token."""
    token = OF_STATE * profile.states.num_elements
    text_model = model.text_model if isinstance(model, HostedModel) else model
    for name, module in weighted_layers(text_model):
        if not _is_outside(name, module, profile):
            token += 2 * products(module, experts(model))
    pairs = Counter[int | None]()
    of_layers = profile.chunk_attentions
    for layer, most in zip(of_layers, limits(each.sees for each in of_layers), strict=True):
        pairs[most] += 2 * layer.num_heads * (layer.shape.head_dim + layer.shape.v_head_dim)
    return Work(token, tuple(Pairs(*each) for each in pairs.items()))


def weighted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that have a weight of two axes or more, by name."""
    for name, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        weight = getattr(layer, "weight", None)
        if isinstance(weight, mx.array) and weight.ndim > 1:
            yield name, layer


def products(layer: nn.Module, num_experts: int) -> int:
    """How many weights of a layer multiply a token. Of experts, `num_experts` compute it."""
    count = weight_count(layer)
    if isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
        stored: int = layer.weight.shape[0]
        return count // stored * min(num_experts, stored)
    return count


def weight_count(layer: nn.Module) -> int:
    """How many weights a layer has, quantized or not."""
    weight: mx.array = layer.weight
    return int(weight.size * (32 // layer.bits if weight.dtype == mx.uint32 else 1))


def _is_outside(name: str, layer: nn.Module, profile: ModelProfile) -> bool:
    """Whether a layer is an embedding or the output projection, which no list of layers has."""
    if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding):
        return True
    is_listed = any(part.isdecimal() for part in name.split("."))
    return not is_listed and layer.weight.shape[-2] == profile.logit_columns
