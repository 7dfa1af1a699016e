"""Random EAGLE-3 heads of tiny models, in the published layouts, and what such a head computes."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import create_attention_mask

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INNER = 4, 2, 16, 96
THETA, EPS = 10000.0, 1e-5
HEAD_WIDTH = NUM_HEADS * HEAD_DIM
DRAFTED = 48  # tokens that a head with a vocabulary of its own can guess


def layer_config(width: int, vocab_size: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": vocab_size,
        "max_position_embeddings": 1024,
    } | more


def write_head(
    folder: Path,
    *,
    target_width: int,
    vocab_size: int,
    width: int | None = None,
    num_states: int = 3,
    is_speculators: bool = False,
    has_embeddings: bool = False,
    drafted: int | None = DRAFTED,
    seed: int = 0,
    layer: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, np.ndarray]:
    """Write a random head and return its tensors. `config` are fields of the head's own, `layer` of
    its layer; `drafted` None: it guesses every token, and its files do not say how many."""
    rng, width = np.random.default_rng(seed), width or target_width
    layer = layer or {}

    def drawn(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.3 * rng.standard_normal(size)).astype(np.float32)

    prefix, fused = "layers.0" if is_speculators else "midlayer", num_states * target_width
    tensors = {
        f"{prefix}.self_attn.q_proj.weight": 2 * drawn(HEAD_WIDTH, 2 * width),
        f"{prefix}.self_attn.k_proj.weight": 2 * drawn(NUM_KV_HEADS * HEAD_DIM, 2 * width),
        f"{prefix}.self_attn.v_proj.weight": drawn(NUM_KV_HEADS * HEAD_DIM, 2 * width),
        f"{prefix}.self_attn.o_proj.weight": drawn(width, HEAD_WIDTH),
        f"{prefix}.mlp.gate_proj.weight": drawn(INNER, width),
        f"{prefix}.mlp.up_proj.weight": drawn(INNER, width),
        f"{prefix}.mlp.down_proj.weight": drawn(width, INNER),
        f"{prefix}.input_layernorm.weight": norm(width),
        f"{prefix}.hidden_norm.weight": norm(width),
        f"{prefix}.post_attention_layernorm.weight": norm(width),
        "fc.weight": drawn(width, fused),
        "norm.weight": norm(width),
        "lm_head.weight": 3 * drawn(drafted or vocab_size, width),
    }
    if layer.get("model_type") == "qwen3":
        tensors[f"{prefix}.self_attn.q_norm.weight"] = norm(HEAD_DIM)
        tensors[f"{prefix}.self_attn.k_norm.weight"] = norm(HEAD_DIM)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(fused)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(target_width) for i in range(num_states)}
    if has_embeddings:
        tensors["embed_tokens.weight"] = drawn(vocab_size, width)
    if width != target_width:
        config["target_hidden_size"] = target_width
    if drafted:
        ids = np.sort(rng.permutation(vocab_size)[:drafted])
        tensors["d2t"] = ids - np.arange(drafted)
        tensors["t2d"] = np.isin(np.arange(vocab_size), ids)
        config["draft_vocab_size"] = drafted
    of_layer = layer_config(width, vocab_size, **layer)
    if is_speculators:
        whole = {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}
        whole |= config | {"transformer_layer_config": of_layer, "tie_word_embeddings": False}
    else:
        whole = {"architectures": ["LlamaForCausalLMEagle3"]} | of_layer | config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(whole))
    mx.save_safetensors(
        str(folder / "model.safetensors"), {k: mx.array(v) for k, v in tensors.items()}
    )
    return tensors


_folders: list[tempfile.TemporaryDirectory[str]] = []


def random_head(model: nn.Module) -> str:
    """A folder with a random head of a tiny model, which lives as long as the process."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    width = max(tables, key=len).shape[1]
    return _random_head(max(map(len, tables)), width, len(model.layers))


@cache
def _random_head(vocab_size: int, width: int, num_layers: int) -> str:
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name)
    ids = [min(1, num_layers - 1), num_layers - 1, num_layers]
    write_head(
        folder,
        target_width=width,
        vocab_size=vocab_size,
        eagle_aux_hidden_state_layer_ids=ids,
    )
    return str(folder)


def target_states(model: nn.Module, tokens: list[int], ids: tuple[int, ...]) -> list[np.ndarray]:
    """The inputs of these layers, ``[T, D]`` each, of a model of llama or qwen3."""
    hidden, inputs = model.model.embed_tokens(mx.array(tokens)[None]), []
    mask = create_attention_mask(hidden, None)
    for layer in model.model.layers:
        inputs.append(hidden)
        hidden = layer(hidden, mask, None)
    inputs.append(hidden)
    return [np.array(inputs[i][0].astype(mx.float32), np.float64) for i in ids]


class Eagle3Reference:
    """A head in NumPy and float64, from the tensors of its file."""

    def __init__(self, tensors: dict[str, np.ndarray], **config: Any) -> None:
        self._tensors = {
            name.replace("midlayer.", "").replace("layers.0.", ""): np.asarray(value, np.float64)
            for name, value in tensors.items()
        }
        self._config = config

    def fused(self, states: list[np.ndarray]) -> np.ndarray:
        own = self._tensors
        if self._config.get("fc_norm"):
            states = [rms(x, own[f"fc_norm.{i}.weight"]) for i, x in enumerate(states)]
        joined = np.concatenate(states, axis=-1)
        if self._config.get("norm_before_fc"):
            joined = rms(joined, own["input_norm.weight"])
        return joined @ own["fc.weight"].T

    def hidden(self, fused: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
        """Of all entries ``[T, D]``, each of which sees those before it."""
        own = self._tensors
        normed = rms(fused, own["hidden_norm.weight"])
        residual = normed if self._config.get("norm_before_residual") else fused
        x = np.concatenate([rms(embeddings, own["input_layernorm.weight"]), normed], axis=-1)
        query, key, value = (
            (x @ own[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, HEAD_DIM)
            for name in "qkv"
        )
        if "self_attn.q_norm.weight" in own:
            query = rms(query, own["self_attn.q_norm.weight"])
            key = rms(key, own["self_attn.k_norm.weight"])
        query, key = rotated(query), rotated(key)
        groups, result = NUM_HEADS // NUM_KV_HEADS, np.zeros((len(x), NUM_HEADS, HEAD_DIM))
        for head in range(NUM_HEADS):
            scores = query[:, head] @ key[:, head // groups].T / np.sqrt(HEAD_DIM)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            result[:, head] = weights / weights.sum(-1, keepdims=True) @ value[:, head // groups]
        hidden = residual + result.reshape(len(x), -1) @ own["self_attn.o_proj.weight"].T
        y = rms(hidden, own["post_attention_layernorm.weight"])
        gate = y @ own["mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (y @ own["mlp.up_proj.weight"].T)
        return hidden + inner @ own["mlp.down_proj.weight"].T

    def logits(self, hidden: np.ndarray, vocab_size: int) -> np.ndarray:
        """Of the target's tokens ``[vocab]``; -inf for those that the head cannot guess."""
        own = self._tensors
        found = rms(hidden, own["norm.weight"]) @ own["lm_head.weight"].T
        if "d2t" not in own:
            return found
        whole = np.full(vocab_size, -np.inf)
        whole[(np.arange(len(found)) + own["d2t"]).astype(int)] = found
        return whole

    def guesses(
        self, states: list[np.ndarray], tokens: list[int], table: np.ndarray, depth: int
    ) -> tuple[list[int], float]:
        """The likeliest next tokens behind `tokens`, and by how little another one was missed.

        Args:
            states: of the target at the tokens' positions but the last one.
            table: the embeddings of all tokens.
        """
        table = self._tensors.get("embed_tokens.weight", table)
        fused, given, found, margin = self.fused(states), [*tokens[1:]], list[int](), np.inf
        for _ in range(depth):
            hidden = self.hidden(fused, table[given])[-1]
            logits = self.logits(hidden, len(table))
            second, first = np.sort(logits)[-2:]
            margin = min(margin, first - second)
            found.append(int(logits.argmax()))
            given.append(found[-1])
            left = hidden
            if self._config.get("norm_output"):
                left = rms(hidden, self._tensors["norm.weight"])
            fused = np.concatenate([fused, left[None]])
        return found, float(margin)


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def rotated(x: np.ndarray) -> np.ndarray:
    """RoPE on ``[T, heads, dim]``, whose halves are pairs."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
