"""Times prompts of models with recurrent layers on a CPU, with this package's ops and with MLX's.

    python -m scripts.recurrent_prompts [--models qwen3_5 mamba] [--tokens 2000] [--rounds 3]

Models have random float32 weights and the layers of a published one, narrower and fewer. An engine
with the ops of docs/cpu-recurrent.md and one with MLX's layers take turns in one process. A turn
is one prompt with one token of output, or, with --decodes, N tokens of each of some sequences. The
table has medians of wall time and of this process's processor time in seconds, and "over": MLX's
over ours in the same round. The last line is one JSON object.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from bench.command import print_result, table
from bench.machine import check_machine, machine_text
from bench.pairs import in_turns, ratio
from mlx_paged import Engine
from mlx_paged.ops.cpu_recurrent import VARIABLE

VOCAB = 2048
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "conv_kernel": 4,
}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": SIZES | DELTA_NET | {"model_type": "qwen3_5"}},
    "kimi_linear": {
        "num_key_value_heads": 8,
        "kv_lora_rank": 128,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "model_max_length": 32768,
        "num_experts": 0,
        "moe_intermediate_size": 256,
        "linear_attn_config": {
            "num_heads": 8,
            "head_dim": 128,
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "short_conv_kernel_size": 4,
        },
    },
    "nemotron_h": {
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "mamba_proj_bias": False,
        "ssm_state_size": 128,
        "n_groups": 8,
        "time_step_limit": (0.001, 100.0),
        "hybrid_override_pattern": ["M", "-", "M", "*", "-", "M"],
        "num_hidden_layers": 6,
    },
    "mamba2": {
        "num_heads": 16,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": 32,
    },
    "mamba": {"state_size": 16, "time_step_rank": 32},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 4,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_dt_rank": 32,
        "mamba_expand": 2,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
    "lfm2": {
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 512,
        "block_ff_dim": 1024,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
}


def build(name: str) -> nn.Module:
    """A model with random float32 weights."""
    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    config = SIZES | {"model_type": name} | MODELS[name]
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def seconds(engine: Engine, prompts: list[list[int]], max_tokens: int) -> tuple[float, float]:
    """Of a turn: wall time and processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    engine.generate(prompts, max_tokens=max_tokens, temperature=0.0)
    return time.perf_counter() - wall, time.process_time() - processor


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of some rounds."""
    model = build(name)
    rng = np.random.default_rng(0)
    count, length, tokens = (args.sequences, 16, args.decodes) if args.decodes else (1, 0, 1)

    def course(engine: Engine) -> Callable[[], tuple[float, float]]:
        def turn() -> tuple[float, float]:
            shape = count, length or args.tokens
            return seconds(engine, rng.integers(0, VOCAB, shape).tolist(), tokens)

        return turn

    options: dict[str, Any] = {"max_running": count, "prefix_cache": False}
    engines = {}
    for engine, value in (("ours", "1"), ("MLX", "0")):
        with patch.dict(os.environ, {VARIABLE: value}):
            engines[engine] = Engine(model, **options)
    courses = {engine: partial(course(made)) for engine, made in engines.items()}
    times = in_turns(courses, args.rounds, warm_up=1)
    result: dict[str, Any] = {"model": name}
    for i, kind in enumerate(("wall", "processor")):
        own = {engine: [pair[i] for pair in pairs] for engine, pairs in times.items()}
        for engine, values in own.items():
            result[f"{engine} {kind}"] = round(median(values), 3)
        result[f"{kind} over"] = round(ratio(own["MLX"], own["ours"]).median, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts.recurrent_prompts", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt")
    parser.add_argument("--decodes", type=int, default=0, metavar="N")
    parser.add_argument("--sequences", type=int, default=4, help="with --decodes")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    machine = check_machine()
    found = [compare(name, args) for name in args.models]
    print(machine_text(machine))
    print(table([[*found[0]], *[[str(value) for value in each.values()] for each in found]]))
    print_result("recurrent_prompts", {**machine, "tokens": args.tokens, "results": found})


if __name__ == "__main__":
    main()
