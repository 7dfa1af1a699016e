"""Checkpoints with an MTP head, tiny and random, in the layouts that are published."""

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from tests.support.models.architectures import config_of

Weights = dict[str, np.ndarray]
"""By published name, in float32, exactly as the file has them."""

# fmt: off
HEADS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"full_attention_interval": 2},
    "qwen3_5": {"num_experts": 0},
    "qwen3_5_moe": {},
    "deepseek_v3": {},
    "deepseek_v32": {"index_n_heads": 8},
    "glm_moe_dsa": {"index_n_heads": 8},
    "glm4_moe": {"attention_bias": True},
    "mimo": {},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
}
"""Architectures whose heads are read, and what each needs beside its sizes elsewhere. With 8 heads
an indexer gives no two keys a score of 0, between which it could pick either."""
# fmt: on


def head_config(model_type: str, **changes: Any) -> dict[str, Any]:
    return config_of(model_type, **HEADS[model_type] | changes)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config.get("text_config", config)
    return found


def head_tensors(config: dict[str, Any], seed: int = 0, own: bool = False) -> Weights:
    """The tensors of a head by their published names.

    Args:
        config: of :func:`head_config`.
        seed: of the random numbers.
        own: whether the head has its own embeddings and output.
    """
    model_type, c = config["model_type"], text_config(config)
    shapes = _shapes(model_type, c)
    if own:
        table = (c["vocab_size"], c["hidden_size"])
        behind = f"model.layers.{c['num_hidden_layers']}"
        shapes |= {f"{behind}.embed_tokens.weight": table}
        shapes |= {f"{behind}.shared_head.head.weight": table}
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        values = rng.normal(size=shape) * (1.5 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.3)
        if "norm" in name and name.endswith("weight"):
            # Qwen stores 1 less. bfloat16 has both of these numbers.
            values = in_bfloat16(values + 1) - model_type.startswith("qwen")
        weights[name] = in_bfloat16(values)
    return weights


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    shards: int = 3,
    as_fp8: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
) -> Path:
    """A folder with config.json and the tensors in bfloat16, in shards with an index, or in one
    file. `as_fp8` are further tensors: bytes of e4m3, and the scales of their blocks."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    entries = {name: ("BF16", _upper_half(values)) for name, values in tensors.items()}
    for name, (values, scales) in (as_fp8 or {}).items():
        entries[name] = ("F8_E4M3", values)
        entries[f"{name}_scale_inv"] = ("F32", scales.astype(np.float32))
    names = sorted(entries)
    files = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
        for i, name in enumerate(names)
    }
    if shards == 1:
        files = dict.fromkeys(names, "model.safetensors")
    for file in set(files.values()):
        write_file(folder / file, {name: entries[name] for name in names if files[name] == file})
    if shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_file(file: Path, entries: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """A safetensors file of these types and bytes (https://github.com/huggingface/safetensors)."""
    header: dict[str, Any] = {}
    body = b""
    for name, (dtype, values) in entries.items():
        end = len(body) + values.nbytes
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [len(body), end]}
        body += values.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def in_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest values of bfloat16, in float32."""
    return (_upper_half(values).astype(np.uint32) << 16).view(np.float32)


def in_fp8(values: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of e4m3 in blocks that each have a scale, the scales, and the values that they mean."""
    rows, columns = values.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scales = np.exp(np.random.default_rng(0).normal(size=grid)).astype(np.float32)
    spread = np.kron(scales, np.ones(block, np.float32))[:rows, :columns]
    stored = np.array(mx.to_fp8(mx.array(values / spread)))
    exponent, mantissa = (stored >> 3) & 15, stored & 7
    size = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    return stored, scales, np.where(stored & 128, -size, size) * spread


def _upper_half(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _shapes(model_type: str, c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width = c["hidden_size"]
    behind = f"model.layers.{c['num_hidden_layers']}"
    match model_type:
        case "mimo":
            layer, projection = "model.mtp_layers.0", "model.mtp_layers.0.input_proj"
            norms = [f"{layer}.{n}_layernorm" for n in ("token", "hidden", "final")]
        case "ernie4_5_moe":
            layer, projection = "model.mtp_block.0", "model.mtp_linear_proj.0"
            norms = ["model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"]
        case "qwen3_next" | "qwen3_5" | "qwen3_5_moe":
            layer, projection = "mtp.layers.0", "mtp.fc"
            norms = ["mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding"]
        case _:
            layer, projection = behind, f"{behind}.eh_proj"
            norms = [f"{behind}.{n}" for n in ("enorm", "hnorm", "shared_head.norm")]
    norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {f"{norm}.weight": (width,) for norm in norms}
    shapes[f"{projection}.weight"] = (width, 2 * width)
    inner = _attention(model_type, c) | _feed_forward(model_type, c)
    return shapes | {f"{layer}.{name}": shape for name, shape in inner.items()}


def _attention(model_type: str, c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads, own = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    shared = c["num_key_value_heads"] * own
    if "kv_lora_rank" in c:
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        query, latent = c["q_lora_rank"], c["kv_lora_rank"]
        found: dict[str, tuple[int, ...]] = {
            "q_a_proj.weight": (query, width),
            "q_a_layernorm.weight": (query,),
            "q_b_proj.weight": (heads * (nope + rope), query),
            "kv_a_proj_with_mqa.weight": (latent + rope, width),
            "kv_a_layernorm.weight": (latent,),
            "kv_b_proj.weight": (heads * (nope + value), latent),
            "o_proj.weight": (width, heads * value),
        }
        if "index_topk" in c:
            index = c["index_head_dim"]
            found |= {
                "indexer.wq_b.weight": (c["index_n_heads"] * index, query),
                "indexer.wk.weight": (index, width),
                "indexer.k_norm.weight": (index,),
                "indexer.k_norm.bias": (index,),
                "indexer.weights_proj.weight": (c["index_n_heads"], width),
            }
    else:
        gated = model_type.startswith("qwen")
        found = {
            "q_proj.weight": ((1 + gated) * heads * own, width),
            "k_proj.weight": (shared, width),
            "v_proj.weight": (shared, width),
            "o_proj.weight": (width, heads * own),
        }
        if gated or model_type == "glm4_moe":
            found |= {"q_norm.weight": (own,), "k_norm.weight": (own,)}
        if model_type in ("mimo", "glm4_moe"):
            found |= {f"{n}_proj.bias": found[f"{n}_proj.weight"][:1] for n in "qkv"}
    return {f"self_attn.{name}": shape for name, shape in found.items()}


def _feed_forward(model_type: str, c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width = c["hidden_size"]
    if model_type in ("mimo", "ernie4_5_moe", "qwen3_5"):
        return _swiglu("mlp", width, c["intermediate_size"])
    count, inner = c["n_routed_experts"], c["moe_intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (count, width)}
    if model_type == "qwen3_5_moe":
        found["mlp.experts.gate_up_proj"] = (count, 2 * inner, width)
        found["mlp.experts.down_proj"] = (count, width, inner)
    else:
        for expert in range(count):
            found |= _swiglu(f"mlp.experts.{expert}", width, inner)
    if model_type.startswith("qwen"):
        found["mlp.shared_expert_gate.weight"] = (1, width)
        return found | _swiglu("mlp.shared_expert", width, c["shared_expert_intermediate_size"])
    found["mlp.gate.e_score_correction_bias"] = (count,)
    return found | _swiglu("mlp.shared_experts", width, inner * c["n_shared_experts"])


def _swiglu(name: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (inner, width),
        f"{name}.up_proj.weight": (inner, width),
        f"{name}.down_proj.weight": (width, inner),
    }


_folders: list[tempfile.TemporaryDirectory[str]] = []


def random_mtp_head(model: nn.Module) -> str:
    """A checkpoint with a random head for a tiny model of one of :data:`HEADS`, which lives as long
    as the process."""
    return _random_mtp_head(model.model_type)


@cache
def _random_mtp_head(model_type: str) -> str:
    _folders.append(tempfile.TemporaryDirectory())
    config = head_config(model_type)
    return str(write_checkpoint(Path(_folders[-1].name), config, head_tensors(config)))
