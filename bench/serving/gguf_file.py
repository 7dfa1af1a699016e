"""A model's weights in GGUF, the file format of llama.cpp. Knows no engine."""

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}
"""By the model type of mlx-lm."""

INTERLEAVED = ("attn_q.", "attn_k.")
"""Tensors whose rows llama.cpp rotates in pairs of neighbours, in its architecture "llama"."""

UNBOUNDED = 2**20  # tokens of a context, where the model does not say


def check_writable(model: nn.Module) -> None:
    """ValueError for another architecture, rotary scaling, windows, weights not in float32."""
    args = getattr(model, "args", None)
    model_type = getattr(args, "model_type", type(model).__name__)
    if model_type not in ARCHITECTURES:
        raise ValueError(f"expected a model of type {' or '.join(ARCHITECTURES)}, got {model_type}")
    for name in ("rope_scaling", "sliding_window"):
        if getattr(args, name, None) is not None:
            raise ValueError(f"expected a model without {name}, got {getattr(args, name)}")
    for name, weight in tree_flatten(model.parameters()):
        if weight.dtype != mx.float32:
            raise ValueError(f"expected float32 weights, got {weight.dtype} in {name}")


def write_gguf(model: nn.Module, path: Path) -> None:
    """Write a float32 model without a tokenizer; ValueError as in :func:`check_writable`."""
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
    names = gguf.get_tensor_name_map(arch, args.num_hidden_layers)
    is_interleaved = arch is gguf.MODEL_ARCH.LLAMA and not args.rope_traditional
    for name, weight in tree_flatten(model.parameters()):
        name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        rows = np.array(weight)
        if is_interleaved and any(part in name for part in INTERLEAVED):
            rows = interleave_halves(rows, head_dim)
        writer.add_tensor(name, rows)
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
