"""Arguments of ``mlx_paged bench agent_trace``."""

import argparse
from typing import Any

from bench.command import add_rounds, make_parser
from bench.names import SIZES
from mlx_paged.cli import COUNT

HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "mlp_bias": False,
        "attention_bias": False,
        "layer_norm_epsilon": 1e-5,
        "hybrid_override_pattern": ["M", "*"],
    },
    "qwen3_next": {
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 128,
        "moe_intermediate_size": 128,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
}
"""By architecture: what it needs beside a size. Its layers are recurrent and attend, by turns."""

OTHERS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "gemma3_text": {"sliding_window": 512, "sliding_window_pattern": 2},
}
"""Models whose layers attend, all of them or half of them within a window."""

ABOUT = (
    "What an agent's turns reuse of their prompts, and how soon they answer, beside recurrent "
    "layers."
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("agent_trace", ABOUT)
    add = parser.add_argument
    add(
        "--model",
        choices=[*HYBRIDS, *OTHERS],
        default="lfm2",
        help="model to compare with a Llama (default: %(default)s); with --changes it runs alone",
    )
    add(
        "--size",
        choices=SIZES,
        default="reference",
        help="size of both models (default: %(default)s)",
    )
    add(
        "--snapshots",
        type=COUNT,
        default=128,
        help="maximum snapshots of states (default: %(default)s)",
    )
    add("--no-turn-ends", action="store_true", help="do not tell the engine where turns end")
    add(
        "--changes",
        type=int,
        nargs="*",
        metavar="PERCENT",
        help="count what is reused when a prompt changes after so many percent of it, and when its "
        "thoughts are left out (10 50 90 if none is given)",
    )
    add_rounds(parser, 3)
    args = parser.parse_args(argv)
    if args.changes is None and args.model in OTHERS:
        parser.error(f"argument --model: {args.model} has no recurrent layers: give --changes")
    if any(not 0 < percent < 100 for percent in args.changes or ()):
        parser.error("argument --changes: expected numbers from 1 to 99")
    if args.changes == []:
        args.changes = [10, 50, 90]
    return args
