"""A tiny random model of every architecture in mlx-lm, for parity tests and the support matrix."""

from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

Config = dict[str, Any]

VOCAB = 64
WINDOW = 6
"""Tokens that a sliding-window layer sees: fewer than any test prompt has."""

# fmt: off
SIZES: Config = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW,
    "max_position_embeddings": 256, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5,
    "norm_epsilon": 1e-5, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "use_bias": False,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_shared_experts": 1, "n_shared_experts": 1, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1, "decoder_sparse_step": 1, "mlp_only_layers": [], "n_group": 1,
    "topk_group": 1,
    # scales of the granite and minicpm families
    "logits_scaling": 1.0, "attention_multiplier": 0.35, "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0, "scale_depth": 1.4, "scale_emb": 1.0, "dim_model_base": 32,
    # linear attention
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "conv_kernel": 4,
    "use_conv_bias": True,
}
"""Fields that many architectures have, in one consistent size."""

LATENT: Config = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}
"""Multi-head latent attention."""

SPARSE_LATENT: Config = LATENT | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}
"""The same over the 8 keys that an indexer picks."""

WINDOWED: Config = {"layer_types": ["sliding_attention", "full_attention"]}
ROPE_BY_LAYER_TYPE: Config = {
    "rope_parameters": {
        "sliding_attention": {"rope_theta": 1000.0, "rope_type": "default"},
        "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
GROWING_QUERIES: Config = {
    "rope_parameters": {
        "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8,
    },
}
"""Queries are enlarged with their position, every 8 tokens."""

SHORT_CONVOLUTION: Config = {
    "conv_bias": False, "conv_L_cache": 3, "block_dim": 32, "block_ff_dim": 48,
    "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention"], "use_expert_bias": True, "num_dense_layers": 1,
}
DELTA_NET: Config = {"full_attention_interval": 2}
LONGCAT: Config = LATENT | {
    "attention_method": "MLA", "zero_expert_type": "identity", "zero_expert_num": 2,
    "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2, "num_layers": 2,
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "ngram_vocab_size_ratio": 4,
}
KIMI_LINEAR: Config = LATENT | {
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 8, "kda_layers": [1], "full_attn_layers": [2],
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 256,
}
GEMMA4: Config = {
    "num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "sliding_window_pattern": 2,
}

GPT: Config = {
    "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_ctx": 256, "n_inner": 48,
}

PLAIN = """
Klear bitnet cohere deepseek dots1 ernie4_5 gemma glm glm4 granite granitemoe helium
hunyuan_v1_dense internlm3 llama mimo minicpm mixtral nanochat olmo2 olmoe phi phi3 qwen2
qwen2_moe qwen3 qwen3_moe seed_oss solar_open starcoder2 talkie telechat3
"""
"""Architectures that need no more than `SIZES`."""

ARCHITECTURES: dict[str, Config] = {name: {} for name in PLAIN.split()} | {
    "afm7": {
        "hidden_dim": 32, "num_layers": 3, "num_kv_reuse_layers": 1, "num_heads": 4,
        "num_kv_heads": 2, "hidden_dim_scale_factor": 2.0,
    },
    "afmoe": WINDOWED | {"num_dense_layers": 1},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0], "conv_window": 2},
    "bailing_hybrid": LATENT | {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe": {"topk_group": 1},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 1, "num_key_value_heads": 4},
    "bailing_moe_v3": LATENT | {"layer_group_size": 2, "moe_shared_expert_intermediate_size": 16},
    "cohere2": {"sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 32, "n_layers": 2, "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT | {
        "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 64},
    },
    "deepseek_v3": LATENT,
    "deepseek_v32": SPARSE_LATENT,
    "deepseek_v41": {
        "q_lora_rank": 16, "head_dim": 16, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 8,
        "compress_ratios": [0, 0], "kv_source_layer_ids": [0, 1], "index_source_layer_ids": [0, 1],
        "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "exaone": {"num_layers": 2},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": WINDOWED | {"is_moe_layer": [False, True]},
    "falcon_h1": {
        "mamba_d_ssm": 32, "mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 4,
        "mamba_chunk_size": 8,
    },
    "gear": {
        "num_hidden_layers": 3,
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention"],
    },
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window_pattern": 2,
        },
    },
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "gemma3n": {
        "text_config": {
            "model_type": "gemma3n_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB, "rope_local_base_freq": 1000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2, "altup_coef_clip": 1.0, "altup_correct_scale": True,
            "altup_active_idx": 0, "laurel_rank": 4,
        },
    },
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "glm4_moe": {"use_qk_norm": True, "rope_scaling": None},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": SPARSE_LATENT | {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": WINDOWED,
    "gptj": GPT | {"rotary_dim": 4},
    "granitemoehybrid": {
        "shared_intermediate_size": 16, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_proj_bias": False, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_groups": 1,
        "mamba_conv_bias": True, "layer_types": ["mamba", "attention"],
    },
    "hunyuan": {
        "moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True,
        "use_cla": True, "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 2.0},
    },
    "internlm2": {"bias": False},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "mamba_expand": 2,
    },
    "kimi_k25": {"text_config": LATENT},
    "kimi_k3": {"text_config": KIMI_LINEAR | {"num_experts_per_token": 2}},
    "kimi_linear": KIMI_LINEAR,
    "kimi_vl": {"text_config": LATENT},
    "laguna": WINDOWED | ROPE_BY_LAYER_TYPE | {
        "mlp_layer_types": ["dense", "sparse"], "num_attention_heads_per_layer": [4, 2],
    },
    "lfm2": SHORT_CONVOLUTION,
    "lfm2-vl": {"text_config": SHORT_CONVOLUTION | {"model_type": "lfm2"}},
    "lfm2_moe": SHORT_CONVOLUTION,
    "lille-130m": GPT | {"n_embd": 64, "block_size": 256, "n_kv_heads": 2},
    "llama4": {
        "text_config": {
            "num_hidden_layers": 4, "attention_chunk_size": 8, "floor_scale": 8,
            "interleave_moe_layer_step": 2, "intermediate_size_mlp": 48, "rope_scaling": None,
            "use_qk_norm": True, "num_experts_per_tok": 1,
        },
    },
    "llama4_text": {"intermediate_size_mlp": 48, "no_rope_layers": [1, 0], "use_qk_norm": True},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {
        "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2,
        "time_step_limit": (0.01, 10.0), "time_step_rank": 4,
    },
    "mellum": WINDOWED | ROPE_BY_LAYER_TYPE,
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-05, "swa_rope_theta": 1000.0, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "v_head_dim": 4, "swa_head_dim": 8, "swa_v_head_dim": 4,
    },
    "minicpm3": LATENT | {"rope_scaling": {"original_max_position_embeddings": 64}},
    "minimax": {"shared_intermediate_size": 48, "rotary_dim": 4},
    "minimax_m3_vl": {
        "text_config": {
            "dense_intermediate_size": 48, "shared_intermediate_size": 16, "index_n_heads": 2,
            "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2,
            "layer_types": ["full_attention", "sparse_attention"],
        },
    },
    "ministral3": WINDOWED | GROWING_QUERIES,
    "mistral3": {"text_config": WINDOWED | GROWING_QUERIES | {"model_type": "ministral3"}},
    "mistral4": LATENT | GROWING_QUERIES,
    "muse_glimmer": WINDOWED,
    "muse_spark": {
        "text_config": WINDOWED | {
            "post_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0.0], "final_logit_softcapping": 20.0,
            "output_multiplier": 0.2, "moe_hidden_size": 32, "num_shared_experts": 0,
        },
    },
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": n, "no_op": False, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.3, "no_op": False, "replace_with_linear": False},
            }
            for n in (2, 4)
        ],
    },
    "nemotron_h": {
        "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_proj_bias": False, "ssm_state_size": 8,
        "n_groups": 2, "time_step_limit": (0.01, 10.0), "hybrid_override_pattern": ["M", "*"],
    },
    "olmo": {
        "d_model": 32, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 48, "embedding_size": VOCAB,
    },
    "olmo3": WINDOWED,
    "olmo_hybrid": {
        "linear_num_key_heads": 4, "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "openelm": {
        "num_transformer_layers": 2, "model_dim": 32, "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4], "num_kv_heads": [2, 4], "ffn_multipliers": [1.0, 2.0],
    },
    "phi3small": {
        "vocab_size": 100352, "ff_intermediate_size": 48, "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0, "blocksparse_block_size": 32,
    },
    "phimoe": {"rope_scaling": None},
    "phixtral": {
        "num_vocab": VOCAB, "model_dim": 32, "num_heads": 4, "num_layers": 2, "rotary_dim": 4,
    },
    "pixtral": {"text_config": {"model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 8, "attention_window_size": WINDOW, "mamba_d_state": 8,
        "mamba_num_heads": 4, "mamba_chunk_size": 8,
    },
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {
        "schema_version": 1, "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16",
                "block": 512,
            },
        ],
        "text_config": DELTA_NET | {"intermediate_size": 512, "num_experts": 0},
    },
    "qwen": {"kv_channels": 8},
    "qwen2_vl": {"text_config": {"model_type": "qwen2"}},
    "qwen3_5": {"text_config": DELTA_NET},
    "qwen3_5_moe": {"text_config": DELTA_NET},
    "qwen3_next": DELTA_NET,
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "spark2_5": WINDOWED | ROPE_BY_LAYER_TYPE,
    "stablelm": {"use_qkv_bias": True},
    "step3p5": WINDOWED | {
        "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 16,
        "moe_layers_enum": "1",
    },
    "youtu_llm": LATENT,
}
"""What each architecture needs beside or instead of `SIZES`."""

VARIANTS: dict[str, tuple[str, Config]] = {
    "baichuan_m1, windows only": ("baichuan_m1", {"sliding_window_layers": [0, 1]}),
    "falcon_h1, normed state": ("falcon_h1", {"mamba_rms_norm": True}),
    "gear, soft-capped scores": ("gear", {"attn_logit_softcapping": 5.0}),
    "gemma4_text, keys as values": ("gemma4_text", {"attention_k_eq_v": True}),
    "gemma4_text, windows only": ("gemma4_text", {"layer_types": ["sliding_attention"] * 4}),
    "gpt_bigcode, multi-head": ("gpt_bigcode", {"multi_query": False}),
    "internlm2, dynamic RoPE": (
        "internlm2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
    "llama, windowed": ("llama", WINDOWED),
    "llama, scaled RoPE": (
        "llama", {
            "rope_scaling": {
                "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
            },
        },
    ),
    "mimo_v2_flash, sinks everywhere": ("mimo_v2_flash", {"add_full_attention_sink_bias": True}),
    "muse_glimmer, windows only": ("muse_glimmer", {"layer_types": ["sliding_attention"] * 2}),
    "nemotron_h, experts": (
        "nemotron_h", {
            "hybrid_override_pattern": ["M", "*", "E", "-"], "num_hidden_layers": 4,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "plamo2, attention only": ("plamo2", {"mamba_enabled": False}),
}
"""Options of an architecture that change how it attends or what it caches."""
# fmt: on

NOT_ON_A_CPU = {
    "bitnet": "its linear layers are a Metal kernel",
    "muse_spark": "its norms and its routing are Metal kernels",
    "olmo": "needs the package ai2-olmo, and mlx-lm adds the mask 'causal' to the scores",
}
"""Architectures that mlx-lm itself does not run here, and why."""


def config_of(name: str, **changes: Any) -> Config:
    """The whole configuration of a tiny model: of an architecture or a variant, changed further."""
    architecture, variant = VARIANTS.get(name, (name, {}))
    config = ARCHITECTURES[architecture] | variant
    whole = SIZES | {"model_type": architecture}
    if "text_config" in config:
        return whole | config | {"text_config": whole | config["text_config"] | changes}
    return whole | config | changes


def build(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny model with random float32 weights, of an architecture or a variant."""
    config = config_of(name, **changes)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_spread, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def _spread(weight: mx.array) -> mx.array:
    """Float32; what starts as a constant is made random and matrices are enlarged: every logit
    then depends on every token."""
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    weight = weight.astype(mx.float32)
    if mx.all(weight == weight.flatten()[0]).item():
        return weight + 0.4 * mx.random.normal(weight.shape)
    return weight * (2.0 if weight.ndim > 1 else 1.0)
