"""A model's weights in GGUF, the file format of llama.cpp. Knows no engine."""

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
"""By the model type of mlx-lm."""

INTERLEAVED = ("attn_q.", "attn_k.")
"""Tensors whose rows llama.cpp rotates in pairs of neighbours, in its architecture "llama"."""

GROUP, MIDDLE = 32, 8
"""Of GGUF's Q4_0: weights that share a scale, and the number that stands for 0."""

QUANTIZED = ("weight", "scales", "biases")
"""Arrays of a quantized layer."""

UNBOUNDED = 2**20  # tokens of a context, where the model does not say


def check_writable(model: nn.Module) -> None:
    """ValueError for another architecture, rotary scaling, windows, weights that are neither
    float32 nor numbers of Q4_0 beside float16."""
    args: Any = getattr(model, "args", None)
    model_type = getattr(args, "model_type", type(model).__name__)
    if model_type not in ARCHITECTURES:
        raise ValueError(f"expected a model of type {' or '.join(ARCHITECTURES)}, got {model_type}")
    for name in ("rope_scaling", "sliding_window"):
        if getattr(args, name, None) is not None:
            raise ValueError(f"expected a model without {name}, got {getattr(args, name)}")
    if model_type == "qwen3_moe" and not (
        args.norm_topk_prob and args.decoder_sparse_step == 1 and not args.mlp_only_layers
    ):
        raise ValueError("expected experts in all layers, whose weights add up to 1")
    weights = dict(tree_flatten(model.parameters()))
    layers = [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]
    for layer in layers:
        weight, scales, biases = (weights.pop(f"{layer}.{part}") for part in QUANTIZED)
        if 8 * weight.shape[-1] != GROUP * scales.shape[-1]:
            raise ValueError(f"expected 4 bits in groups of {GROUP}, got others in {layer}")
        if not mx.array_equal(biases, -MIDDLE * scales):
            raise ValueError(f"expected biases of -{MIDDLE} scales, got others in {layer}")
    expected, of_type = (mx.float16, "float16") if layers else (mx.float32, "float32")
    for name, weight in weights.items():
        if weight.dtype != expected:
            raise ValueError(f"expected {of_type} weights, got {weight.dtype} in {name}")


def write_gguf(model: nn.Module, path: Path) -> None:
    """Write a model without a tokenizer; ValueError as in :func:`check_writable`."""
    check_writable(model)
    args: Any = model.args
    arch = ARCHITECTURES[args.model_type]
    head_dim = args.head_dim or args.hidden_size // args.num_attention_heads
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(args.num_hidden_layers)
    writer.add_context_length(args.max_position_embeddings or UNBOUNDED)
    writer.add_embedding_length(args.hidden_size)
    writer.add_feed_forward_length(args.intermediate_size)
    writer.add_head_count(args.num_attention_heads)
    writer.add_head_count_kv(args.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(args.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(args.rope_theta)
    writer.add_vocab_size(args.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if (num_experts := getattr(args, "num_experts", 0)) > 0:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(args.num_experts_per_tok)
        writer.add_expert_feed_forward_length(args.moe_intermediate_size)
    names = gguf.get_tensor_name_map(arch, args.num_hidden_layers)
    is_interleaved = arch is gguf.MODEL_ARCH.LLAMA and not args.rope_traditional
    weights = dict(tree_flatten(model.parameters()))
    for own_name, weight in weights.items():
        layer, _, part = own_name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        scales = weights.get(f"{layer}.scales")
        rows = np.array(weight.astype(mx.float32)) if scales is None else q4_0(weight, scales)
        raw = None if scales is None else gguf.GGMLQuantizationType.Q4_0
        own_name = own_name.replace(".switch_mlp.", ".experts.")
        name = names.get_name(own_name, try_suffixes=(".weight", ".bias"))
        if is_interleaved and any(part in name for part in INTERLEAVED):
            rows = interleave_halves(rows, head_dim)
        writer.add_tensor(name, rows, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of heads that rotate row i with row ``i + head_dim / 2``, so that each pair is adjacent.

    Args:
        rows: ``[heads * head_dim, ...]``.
    """
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def q4_0(weight: mx.array, scales: mx.array) -> np.ndarray:
    """Rows of Q4_0's blocks: a float16 scale, then 16 bytes, of which byte i has numbers i and
    i + 16 of the block.

    Args:
        weight: ``[..., width / 8]``, uint32 with 8 numbers of 4 bits each.
        scales: ``[..., width / 32]``.
    """
    pairs = np.array(weight).view(np.uint8)
    numbers = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*scales.shape, GROUP)
    halves = numbers[..., : GROUP // 2] | numbers[..., GROUP // 2 :] << 4
    heads = np.array(scales.astype(mx.float16))[..., None].view(np.uint8)
    return np.concatenate([heads, halves], axis=-1).reshape(*scales.shape[:-1], -1)
