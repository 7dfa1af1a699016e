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
}
"""By architecture: what it needs beside a size. Its layers are recurrent and attend, by turns."""

ABOUT = (
    "What an agent's turns reuse of their prompts, and how soon they answer, beside recurrent "
    "layers."
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("agent_trace", ABOUT)
    add = parser.add_argument
    add(
        "--model",
        choices=HYBRIDS,
        default="lfm2",
        help="model to compare with a Llama (default: %(default)s)",
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
    add_rounds(parser, 3)
    return parser.parse_args(argv)
