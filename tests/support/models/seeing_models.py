"""Tiny random models of mlx-vlm, prompts with random images, and what mlx-vlm answers alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from mlx_paged.prompt import Prompt
from mlx_paged.vision.image_spans import Picture
from mlx_paged.vision.prompts import image_prompt
from tests.support.models.architectures import _spread

Config = dict[str, Any]
Inputs = dict[str, Any]

VOCAB, IMAGE, START, END = 128, 120, 121, 122
WINDOW = 12

TEXT: Config = {
    "model_type": "text", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "sliding_window": WINDOW, "sliding_window_pattern": 2,
}  # fmt: skip
VISION: Config = {
    "model_type": "vision", "depth": 2, "num_hidden_layers": 2, "hidden_size": 16, "embed_dim": 16,
    "out_hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8, "spatial_patch_size": 8, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3, "num_channels": 3, "mlp_ratio": 2,
    "layer_norm_eps": 1e-6,
}  # fmt: skip
WHOLE: Config = {
    "vocab_size": VOCAB, "hidden_size": 32, "image_token_id": IMAGE, "image_token_index": IMAGE,
    "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 123,
    "video_token_index": 123, "pad_token_id": 127, "eos_token_id": [126],
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """How an architecture is made and what its images are.

    Attributes:
        image: random inputs of an image of one of a few sizes, and the number of its tokens.
    """

    image: Callable[[np.random.Generator], tuple[Inputs, int]]
    text: Config
    vision: Config
    whole: Config


def grid(rng: np.random.Generator) -> tuple[Inputs, int]:
    """Patches of the qwen family: an image has as many tokens as its size asks for."""
    h, w = 2 * rng.integers(1, 4), 2 * rng.integers(1, 4)
    pixels = rng.normal(size=(h * w, 3 * 2 * 8 * 8)).astype(np.float32)
    return {"pixel_values": pixels, "image_grid_thw": np.array([[1, h, w]])}, h * w // 4


def square(num_tokens: int, size: int = 32) -> Callable[[np.random.Generator], tuple[Inputs, int]]:
    """Images of one size."""

    def image(rng: np.random.Generator) -> tuple[Inputs, int]:
        pixels = rng.normal(size=(1, 3, size, size)).astype(np.float32)
        return {"pixel_values": pixels}, num_tokens

    return image


def sized(merge: int) -> Callable[[np.random.Generator], tuple[Inputs, int]]:
    """Images of several sizes, with these."""

    def image(rng: np.random.Generator) -> tuple[Inputs, int]:
        pixels = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
        sizes = np.array([[32, 32]])
        return {"pixel_values": pixels, "image_sizes": sizes}, (32 // 8 // merge) ** 2

    return image


def tiles(rng: np.random.Generator) -> tuple[Inputs, int]:
    """Images in one or two tiles of four tokens."""
    count = int(rng.integers(1, 3))
    return {"pixel_values": rng.normal(size=(1, count, 3, 32, 32)).astype(np.float32)}, 4 * count


def rows(times: int) -> Callable[[np.random.Generator], tuple[Inputs, int]]:
    """Patches as those of the qwen family, of so many pictures."""

    def image(rng: np.random.Generator) -> tuple[Inputs, int]:
        inputs, count = grid(rng)
        pixels = inputs["pixel_values"].reshape(-1, 2, 3 * 8 * 8)[:, :times]
        return inputs | {"pixel_values": pixels.reshape(4 * count, -1)}, count

    return image


def hws(rng: np.random.Generator) -> tuple[Inputs, int]:
    """Patches that are squares, and heights and widths."""
    inputs, count = rows(1)(rng)
    pixels = inputs["pixel_values"].reshape(-1, 3, 8, 8)
    return {"pixel_values": pixels, "image_grid_hws": inputs["image_grid_thw"][:, 1:]}, count


def squares(rng: np.random.Generator) -> tuple[Inputs, int]:
    """Patches that are squares, in one row."""
    inputs, count = rows(1)(rng)
    return inputs | {"pixel_values": inputs["pixel_values"].reshape(1, -1, 3, 8, 8)}, count


def padded(rng: np.random.Generator) -> tuple[Inputs, int]:
    """Patches of an image of any size, with empty ones up to 36."""
    inputs, count = rows(1)(rng)
    pixels = np.zeros((1, 36, 3 * 8 * 8), np.float32)
    pixels[0, : 4 * count] = inputs["pixel_values"]
    mask = (np.arange(36) < 4 * count)[None].astype(np.int32)
    shapes = inputs["image_grid_thw"][:, 1:]
    own = {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    return own, count


LINEAR: Config = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "rope_parameters": {
        "type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
}  # fmt: skip
EXPERTS: Config = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "shared_expert_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CLIP: Config = {"model_type": "clip_vision_model"}
SIGLIP: Config = {"model_type": "siglip_vision_model"}
MROPE: Config = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}

DEEP: Config = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
SIZED: Config = {"model_type": "pixtral", "head_dim": 8}
LLAMA_4: Config = {
    "rope_parameters": {
        "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "rope_type": "default",
        "original_max_position_embeddings": 8,
    },
}  # fmt: skip
PLAIN: Config = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
LATENT: Config = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "qk_nope_head_dim": 8,
}  # fmt: skip
CONVOLVED: Config = {
    "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "block_dim": 32,
    "conv_dim": 32, "block_auto_adjust_ff_dim": False,
}  # fmt: skip
FLAT = DEEP | {"deepstack_visual_indexes": []}
KINDS = {
    "aya_vision": Kind(square(4), {}, SIGLIP, {"alignment_intermediate_size": 64}),
    "dots_ocr": Kind(
        rows(1), {}, {"model_type": "dots_vit", "hidden_size": 32, "temporal_patch_size": 1}, {}
    ),
    "gemma3": Kind(square(4), {"query_pre_attn_scalar": 8, "mm_tokens_per_image": 4}, SIGLIP, {}),
    "gemma4": Kind(
        square(4, 48),
        {
            "num_hidden_layers": 4,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 8,
            "default_output_length": 4,
            "position_embedding_size": 64,
        },
        {"audio_token_id": 124},
    ),
    "glm4v": Kind(
        grid,
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 0, 1]}},
        {"model_type": "glm4v"},
        {},
    ),
    "glm4v_moe": Kind(
        grid,
        EXPERTS
        | {
            "rope_scaling": {"type": "default", "mrope_section": [1, 0, 1]},
            "use_qk_norm": True,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
        },
        {"model_type": "glm4v_moe"},
        {},
    ),
    "glm_ocr": Kind(
        grid,
        {
            "rope_parameters": {
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
                "partial_rotary_factor": 1.0,
                "rope_type": "default",
            }
        },
        {"model_type": "glm_ocr"},
        {},
    ),
    "idefics3": Kind(tiles, {}, {"model_type": "idefics3"}, {}),
    "internvl": Kind(square(4), {}, {}, {}),
    "internvl_chat": Kind(square(4), {}, {"model_type": "intern_vit_6b"}, {}),
    "kimi_vl": Kind(
        hws,
        EXPERTS | LATENT | {"model_type": "deepseek_v3"},
        {
            "model_type": "moonvit",
            "hidden_size": 32,
            "embed_dim": 32,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
        },
        {"media_placeholder_token_id": IMAGE},
    ),
    "lfm2_vl": Kind(padded, CONVOLVED, {"model_type": "lfm2_vl", "num_patches": 16}, {}),
    "llava": Kind(square(16), {"model_type": "llama"}, CLIP, {"vision_feature_layer": -1}),
    "mage_vl": Kind(
        rows(1), {}, {"hidden_size": 64, "temporal_patch_size": 1, "text_hidden_size": 32}, {}
    ),
    "mistral3": Kind(sized(2), PLAIN | {"model_type": "mistral"}, SIZED, {}),
    "mistral3 ministral3": Kind(sized(2), LLAMA_4 | {"model_type": "ministral3"}, SIZED, {}),
    "paddleocr_vl": Kind(
        squares,
        {
            "hidden_size": 1024,
            "use_bias": False,
            "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]},
        },
        {"model_type": "paddleocr_vl"},
        {},
    ),
    "pixtral": Kind(sized(1), {"model_type": "mistral"}, SIZED, {}),
    "qwen2_vl": Kind(grid, MROPE, {"model_type": "qwen2_vl", "hidden_size": 32}, {}),
    "qwen2_5_vl": Kind(
        grid,
        MROPE,
        {"model_type": "qwen2_5_vl", "window_size": 32, "fullatt_block_indexes": [1]},
        {},
    ),
    "qwen3_vl": Kind(grid, MROPE, DEEP | {"model_type": "qwen3_vl"}, {}),
    "qwen3_vl_moe": Kind(grid, MROPE | EXPERTS, DEEP | {"model_type": "qwen3_vl_moe"}, {}),
    "qwen3_5": Kind(grid, LINEAR, FLAT | {"model_type": "qwen3_5"}, {}),
    "qwen3_5_moe": Kind(grid, LINEAR | EXPERTS, FLAT | {"model_type": "qwen3_5_moe"}, {}),
    "smolvlm": Kind(tiles, {}, {"model_type": "smolvlm_vision"}, {}),
}


def build(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny model with random float32 weights; `changes` are of its text and of the whole."""
    kind, module = KINDS[name], import_module(f"mlx_vlm.models.{name.split()[0]}")
    text = module.TextConfig.from_dict(TEXT | kind.text | changes)
    vision = module.VisionConfig.from_dict(VISION | kind.vision)
    known = module.ModelConfig.__dataclass_fields__
    whole = {key: value for key, value in (WHOLE | kind.whole | changes).items() if key in known}
    mx.random.seed(seed)
    model: nn.Module = module.Model(
        module.ModelConfig(
            **{"model_type": name.split()[0]}
            | whole
            | {"text_config": text, "vision_config": vision}
        )
    )
    model.update(tree_map(_spread, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def picture(name: str, seed: int) -> Picture:
    """A random image in the middle of a prompt of its own."""
    inputs, count = KINDS[name].image(np.random.default_rng(seed))
    tokens = np.array([START, *[IMAGE] * count, END], np.int32)
    digest = blake2b(f"{name} {seed}".encode(), digest_size=32).digest()
    return Picture(digest, tokens, np.arange(1, count + 1), inputs)


def prompt(model: nn.Module, name: str, *parts: Sequence[int] | Picture) -> Prompt:
    """A prompt of tokens and images."""
    tokens = [int(t) for part in parts for t in getattr(part, "tokens", part)]
    return image_prompt(model, tokens, [part for part in parts if isinstance(part, Picture)])


def words(seed: int, count: int) -> list[int]:
    """Random tokens of text."""
    found: list[int] = np.random.default_rng(seed).integers(1, 119, count).tolist()
    return found


def alone(model: nn.Module, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What mlx-vlm answers to one prompt."""
    return [int(token) for token, _ in _steps(model, prompt, max_tokens)]


def next_logprobs(model: nn.Module, prompt: Sequence[int], more: Sequence[int]) -> mx.array:
    """``[V]``: mlx-vlm's log-probabilities after a prompt and more tokens of text."""
    ((_, logprobs),) = _steps(model, prompt, 1, more)
    return logprobs.reshape(-1)


def _steps(
    model: nn.Module, prompt: Sequence[int], max_tokens: int, more: Sequence[int] = ()
) -> list[Any]:
    from mlx_vlm.generate import generate_step

    tokens = mx.array([[*prompt, *more]])
    options: Inputs = _inputs(prompt) | {"max_tokens": max_tokens, "temperature": 0.0}
    return list(generate_step(tokens, model, mask=mx.ones_like(tokens), **options))


def _inputs(prompt: Sequence[int]) -> Inputs:
    inputs: Inputs = {"pixel_values": None}
    if isinstance(prompt, Prompt):
        pictures = prompt.image_spans.pictures
        inputs = {
            key: mx.array(np.concatenate([p.inputs[key] for p in pictures], int(value.ndim == 5)))
            for key, value in pictures[0].inputs.items()
        }
    return inputs
