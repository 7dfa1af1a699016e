"""Tiny random models of mlx-lm's architectures, for parity tests."""

from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import generate_step

VOCAB = 128

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": COMMON
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "phi3": COMMON | {"rope_scaling": None},
    "mixtral": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": COMMON
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
    },
    "gemma2": COMMON | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "deepseek_v3": COMMON
    | {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "jamba": COMMON
    | {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "lfm2": COMMON
    | {
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "mamba2": COMMON
    | {
        "num_heads": 4,
        "head_dim": 32,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "expand": 2,
        "chunk_size": 16,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": (0.01, 10.0),
        "time_step_rank": 8,
        "residual_in_fp32": False,
    },
    "afm7": COMMON
    | {
        "num_kv_reuse_layers": 1,
        "hidden_dim": 64,
        "hidden_dim_scale_factor": 2.0,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "llama4_text": COMMON
    | {
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "rope_scaling": None,
        "use_qk_norm": True,
        "no_rope_layers": [1, 1, 0],
        "attn_temperature_tuning": 1,
        "floor_scale": 8,
        "attn_scale": 0.1,
    },
    "gpt_bigcode": {
        "n_embd": 64,
        "n_layer": 2,
        "n_inner": 96,
        "n_head": 4,
        "n_positions": 256,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": VOCAB,
    },
}


def tiny_model(model_type: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A model of this architecture with random float32 weights."""
    module = import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(seed)
    config = {"model_type": model_type} | CONFIGS[model_type] | changes
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_spread, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def _spread(weight: mx.array) -> mx.array:
    """Float32, and matrices enlarged: attention then depends on every key."""
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    return weight.astype(mx.float32) * (2.0 if weight.ndim > 1 else 1.0)


def solo_greedy(model: nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """What mlx-lm generates for this prompt alone."""
    steps = generate_step(mx.array(prompt), model, max_tokens=num_tokens)
    return [int(token) for token, _ in steps]
