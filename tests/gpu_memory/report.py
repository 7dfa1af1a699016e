"""``python -m tests.gpu_memory.report``: what the steps of an engine take of a GPU's memory."""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma3_text, llama, qwen3_5, qwen3_moe

from mlx_paged.attention import forward
from mlx_paged.kv.memory import CACHE_SHARE
from mlx_paged.runner.step_memory import step_bytes
from mlx_paged.scheduler.scheduler import Scheduler
from tests.gpu_memory.allocator import NO_LIMIT, Allocator
from tests.gpu_memory.engine_steps import StepArrays, metals_ops, steps_of
from tests.gpu_memory.replay import Device

GB = 1e9
WORKLOADS = {  # the longest prompt; seconds of the stall bound
    "chat": (2_000, 0.1),
    "long prompts": (16_000, 0.1),
    "no stall bound": (4_000, None),
}
COLUMNS = "model", "prompts", "sizes", "limit", "new buffers", "mapped", "reused", "cached"
COLUMNS += "active", "together", "step"
LLAMA = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256}
QWEN = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "head_dim": 128}
QWEN |= {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151_936}
QWEN |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
GEMMA = {"hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 62}
GEMMA |= {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
HYBRID = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32}
HYBRID |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
HYBRID |= {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "vocab_size": 248_320}
HYBRID |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama 8B": (llama.Model, llama.ModelArgs, LLAMA | {"tie_word_embeddings": False}),
    "qwen3 30B-A3B": (qwen3_moe.Model, qwen3_moe.ModelArgs, QWEN),
    "qwen3.5 9B": (qwen3_5.TextModel, qwen3_5.TextModelArgs, HYBRID),
    "gemma3 27B": (gemma3_text.Model, gemma3_text.ModelArgs, GEMMA),
}
COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False}
COMMON |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
COMMON |= {"max_position_embeddings": 32_768, "model_type": "text"}


def made(name: str, layers: int | None = None) -> nn.Module:
    """A model in 4 bits whose weights nobody computes."""
    model_class, args_class, config = MODELS[name]
    config = COMMON | config | ({} if layers is None else {"num_hidden_layers": layers})
    model: nn.Module = model_class(args_class.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model)
    return model


def replayed(
    model: nn.Module,
    workload: str,
    num_steps: int,
    limits: Sequence[int],
    *,
    few_sizes: bool = True,
    even_lengths: bool = True,
    seed: int = 0,
) -> list[Allocator]:
    """What an allocator with each of these limits did for the steps of one engine."""
    longest, max_stall = WORKLOADS[workload]
    allocators = [Allocator(limit) for limit in limits]
    devices = [Device(allocator, seed) for allocator in allocators]
    exact = patch.object(forward, "even_length", int)
    with metals_ops(), nullcontext() if even_lengths else exact:
        arrays = StepArrays(model, 100_000)
        options = {"max_stall": max_stall, "few_sizes": few_sizes}
        scheduler = Scheduler(arrays.blocks, 32, 512, **options)
        for step in steps_of(scheduler, seed, num_steps, longest):
            computed = arrays.ops(step)
            for device in devices:
                device.run(*computed)
    return allocators


def promised(model: nn.Module, plain: bool = False) -> int:
    """Bytes of the arrays of a step. `plain`: of plain MLX."""
    with metals_ops():
        profile = StepArrays(model, 1000).profile
    return step_bytes(model, profile, 512, 32, plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--working-set", type=float, default=28.99, metavar="GB")
    parser.add_argument("--model", choices=[*MODELS], nargs="*", default=[*MODELS])
    args = parser.parse_args()
    tenth = int(CACHE_SHARE * args.working_set * GB)
    print("|", " | ".join(COLUMNS), "|")
    for name in args.model:
        model = made(name, args.layers)
        step = promised(model)
        limits = NO_LIMIT, max(tenth, step)
        for workload in WORKLOADS:
            for is_few in (False, True):
                options = {"few_sizes": is_few, "even_lengths": is_few}
                found = replayed(model, workload, args.steps, limits, **options)
                for limit, each in zip(limits, found, strict=True):
                    sizes = each.mapped, each.reused, each.peak_cached, each.peak_active, each.peak
                    kind = "few" if is_few else "any", "default" if limit < NO_LIMIT else "none"
                    new = f"{each.num_new / args.steps:.0f}"
                    sizes_in_gb = (f"{size / GB:.1f}" for size in (*sizes, step))
                    row = name, workload, *kind, new, *sizes_in_gb
                    print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()
