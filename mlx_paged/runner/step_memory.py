"""How much memory the arrays of a step take at most, as the widths of a model's layers say."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_paged.attention.forward import GATHERED, SCORES
from mlx_paged.attention.paths import has_matrix_units, is_fused
from mlx_paged.command_buffers import most_elements
from mlx_paged.kv.memory import LONG_PROMPT, working_set
from mlx_paged.kv.shapes import KVShape
from mlx_paged.runner.batch import row_bucket
from mlx_paged.runner.model_probe import ModelProfile
from mlx_paged.sampling import prompt_scores
from mlx_paged.scheduler.budget import MOST_SCORED

COPIES = 3  # arrays as wide as a product's output that come of it, that output included
OF_LOGITS = 4  # arrays of a row of logits in float32 that the sampler makes
STEPS = 2  # the step that is encoded, and the one before it

PARTIALS = 1 << 24
"""Bytes at most of the partial results of one call of attention, whose contexts are split."""
SPLIT_ROWS = 1 << 15
"""Partial results of all rows of chunks together, at most, unless each row has `SPLITS` of them."""

SPLITS = 8
"""Partial results of a row of a chunk, at most, for contexts of up to `LONG_PROMPT` keys."""

MOST_SPLITS = 64
"""Partial results of a row of a decode, at most."""

IN_FLIGHT = 12
"""MLX waits while more than ten command buffers are under way. The outputs of the last one wait."""

SCORE_ARRAYS = 2  # the scores of queries where MLX has no fast kernel, and what comes of them
MASKS = 4  # bytes of the masks of a query and a key


def step_bytes(
    model: nn.Module,
    profile: ModelProfile,
    chunk: int,
    max_running: int,
    plain: bool = False,
    context: int = LONG_PROMPT,
) -> int:
    """Bytes of the arrays that are alive at once while a step computes `chunk` tokens of prompts
    beside `max_running` sequences: all of two steps, or what the command buffers bind that may be
    under way.

    Args:
        plain: plain MLX attends, over gathered keys. Then there is one step at a time.
        context: tokens of the longest sequence. Without `plain`, of `LONG_PROMPT`.
    """
    widths = vocab = 0
    for name, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, mx.array) or weight.ndim < 2:
            continue
        if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding) or "head" in name:
            vocab = max(vocab, weight.shape[0])
            continue
        is_switch = isinstance(layer, SwitchLinear | QuantizedSwitchLinear)
        widths += weight.shape[-2] * (experts(model) if is_switch else 1)
    shapes = [shape for shape in profile.shapes if shape is not None]
    item = max((shape.dtype.size for shape in shapes), default=4)
    gathered = max((LONG_PROMPT * shape.token_bytes // item for shape in shapes), default=0)
    scores = SCORES * sum(not is_fused(shape) for shape in shapes if has_matrix_units())
    partials = partial_bytes(profile, chunk, max_running) // item
    of_attention = len(shapes) * (gathered + partials)
    arrays = COPIES * ((chunk + max_running) * widths + scores) + of_attention
    alive = min(STEPS * arrays, IN_FLIGHT * (most_elements() + max(gathered, partials))) * item
    if plain:
        found = Gathered.of(profile, chunk, max_running, context)
        layers = COPIES * (chunk + max_running) * widths * item
        alive = min(layers + found.all_layers, IN_FLIGHT * found.command)
    states = STEPS * row_bucket(max_running) * profile.states.num_bytes
    # While prompts are scored, no sampler runs, but what it will read is there twice.
    scored = item * (MOST_SCORED + 2 * max_running) + 4 * prompt_scores.ARRAYS * prompt_scores.PART
    return alive + states + max(4 * OF_LOGITS * max_running, scored) * vocab


@dataclass(frozen=True, slots=True)
class Gathered:
    """What attention of plain MLX makes in a step, in bytes.

    Attributes:
        all_layers: the arrays of all layers.
        command: what a command buffer binds, with its last op.
    """

    all_layers: int
    command: int

    @classmethod
    def of(cls, profile: ModelProfile, chunk: int, max_running: int, context: int) -> "Gathered":
        """A step gathers the keys of each running sequence once in a layer, of `context` tokens."""
        heads = {kind.shape: kind.num_heads for kind in profile.attentions}
        all_layers, largest, widest = 0.0, 0, 1
        for shape in profile.shapes:
            if shape is None:
                continue
            item, num_heads = shape.dtype.size, heads.get(shape, shape.n_kv_heads)
            queries = max_running + chunk
            of_query = MASKS + (0 if _has_fast_kernel(shape) else SCORE_ARRAYS * num_heads * item)
            all_layers += context * (max_running * shape.gathered_bytes + queries * of_query)
            all_layers += queries * shape.elements * shape.plainly_written
            width = shape.widest
            call = max(GATHERED, context * shape.elements)
            largest = max(largest, call * 2 * width, SCORE_ARRAYS * SCORES * item)
            widest = max(widest, width)
        return cls(int(all_layers), most_elements() * widest + largest)


def _has_fast_kernel(shape: KVShape) -> bool:
    """Whether MLX attends without scores in memory: Metal's kernel does."""
    return working_set() is not None and is_fused(shape)


def partial_bytes(profile: ModelProfile, chunk: int, num_decodes: int) -> int:
    """Bytes of the partial results of a layer's attention at most, in float32."""
    found = [0]
    for kind in profile.attentions:
        rows = max(SPLIT_ROWS, SPLITS * chunk * kind.num_heads)
        rows += MOST_SPLITS * num_decodes * kind.num_heads
        found.append(min(PARTIALS, 4 * rows * (kind.shape.v_head_dim + 2)))
    return max(found)


def experts(model: nn.Module) -> int:
    """How many experts compute a token."""
    args: Any = getattr(model, "args", None)
    text = getattr(args, "text_config", None) or {}
    text = text if isinstance(text, dict) else vars(text)
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    found = (getattr(args, name, None) or text.get(name) for name in names)
    return next((int(count) for count in found if count), 8)
