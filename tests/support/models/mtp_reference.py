"""MTP heads in NumPy and float64, of tensors with their published names. Written apart from the
product: the formulas are those of the models' reports and of their published reference code."""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray


class ReferenceHead:
    """A head that computes all entries of a sequence at once.

    Args:
        model_type: architecture.
        c: configuration of the language model.
        weights: by published names.
        final_norm: of the model, for heads without one of their own.
    """

    def __init__(
        self, model_type: str, c: dict[str, Any], weights: dict[str, Array], final_norm: Array
    ) -> None:
        self.model_type, self.c, self.final_norm = model_type, c, final_norm
        self.w = {name: values.astype(np.float64) for name, values in weights.items()}
        behind = f"model.layers.{c['num_hidden_layers']}"
        self.layer = {"mimo": "model.mtp_layers.0", "ernie4_5_moe": "model.mtp_block.0"}.get(
            model_type, "mtp.layers.0" if model_type.startswith("qwen") else behind
        )

    def entries(self, states: Array, embeddings: Array) -> Array:
        """Hidden states ``[L, D]`` of entries: `states` ``[L, D]`` of the positions before, and
        the embeddings ``[L, D]`` of the entries' own tokens."""
        match self.model_type:
            case "mimo":
                e = self.norm(embeddings, f"{self.layer}.token_layernorm")
                h = self.norm(states, f"{self.layer}.hidden_layernorm")
                x = self.times(np.concatenate([h, e], -1), f"{self.layer}.input_proj")
            case "ernie4_5_moe":
                e = self.norm(embeddings, "model.mtp_emb_norm.0")
                h = self.norm(states, "model.mtp_hidden_norm.0")
                x = self.times(np.concatenate([e, h], -1), "model.mtp_linear_proj.0")
            case "qwen3_next" | "qwen3_5" | "qwen3_5_moe":
                e = self.norm(embeddings, "mtp.pre_fc_norm_embedding")
                h = self.norm(states, "mtp.pre_fc_norm_hidden")
                x = self.times(np.concatenate([e, h], -1), "mtp.fc")
            case _:
                e = self.norm(embeddings, f"{self.layer}.enorm")
                h = self.norm(states, f"{self.layer}.hnorm")
                x = self.times(np.concatenate([e, h], -1), f"{self.layer}.eh_proj")
        attend = self._latent if "kv_lora_rank" in self.c else self._attention
        x = x + attend(self.norm(x, f"{self.layer}.input_layernorm"))
        return x + self._feed_forward(self.norm(x, f"{self.layer}.post_attention_layernorm"))

    def normed(self, hidden: Array) -> Array:
        """What the output projection reads."""
        match self.model_type:
            case "mimo":
                return self.norm(hidden, f"{self.layer}.final_layernorm")
            case "ernie4_5_moe":
                return rms(hidden, self.c["rms_norm_eps"]) * self.final_norm
            case "qwen3_next" | "qwen3_5" | "qwen3_5_moe":
                return self.norm(hidden, "mtp.norm")
        return self.norm(hidden, f"{self.layer}.shared_head.norm")

    def fed_back(self, hidden: Array) -> Array:
        """What the next guess reads: un-normed for DeepSeek's and GLM's heads."""
        is_behind = self.layer.startswith("model.layers.")
        return hidden if is_behind else self.normed(hidden)

    def norm(self, x: Array, name: str, eps: float | None = None) -> Array:
        weight = self.w[f"{name}.weight"] + self.model_type.startswith("qwen")
        return rms(x, self.c["rms_norm_eps"] if eps is None else eps) * weight

    def times(self, x: Array, name: str) -> Array:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def _attention(self, x: Array) -> Array:
        c, name = self.c, f"{self.layer}.self_attn"
        heads, own, length = c["num_attention_heads"], c["head_dim"], len(x)
        q = self.times(x, f"{name}.q_proj").reshape(length, heads, -1)
        gate = q[..., own:].reshape(length, -1)
        q = q[..., :own]
        k, v = (self.times(x, f"{name}.{n}_proj").reshape(length, -1, own) for n in "kv")
        if f"{name}.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        share, base = self._rope()
        rotate = paired if self.model_type == "ernie4_5_moe" else halved
        q, k = (rotate(t, int(own * share), base) for t in (q, k))
        k, v = (np.repeat(t, heads // t.shape[1], axis=1) for t in (k, v))
        y = softmax_attention(q, k, v, own**-0.5, causal(length)).reshape(length, -1)
        if gate.size:
            y = y / (1 + np.exp(-gate))
        return self.times(y, f"{name}.o_proj")

    def _rope(self) -> tuple[float, float]:
        """The share of a head's numbers that RoPE turns, and its base."""
        if self.model_type in ("qwen3_5", "qwen3_5_moe"):
            return 0.25, 100000.0
        is_whole = self.model_type in ("mimo", "ernie4_5_moe")
        return 1.0 if is_whole else self.c["partial_rotary_factor"], self.c["rope_theta"]

    def _latent(self, x: Array) -> Array:
        c, name, length = self.c, f"{self.layer}.self_attn", len(x)
        heads, nope, turned = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        low = self.norm(self.times(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", 1e-6)
        q = self.times(low, f"{name}.q_b_proj").reshape(length, heads, nope + turned)
        both = self.times(x, f"{name}.kv_a_proj_with_mqa")
        latent, key = both[:, : c["kv_lora_rank"]], both[:, None, c["kv_lora_rank"] :]
        latent = self.norm(latent, f"{name}.kv_a_layernorm", 1e-6)
        kv = self.times(latent, f"{name}.kv_b_proj").reshape(length, heads, -1)
        base = c["rope_theta"]
        q = np.concatenate([q[..., :nope], paired(q[..., nope:], turned, base)], -1)
        key = np.repeat(paired(key, turned, base), heads, axis=1)
        k = np.concatenate([kv[..., :nope], key], -1)
        seen = causal(length)
        if "index_topk" in c:
            seen = seen & self._picked(x, low, seen)
        y = softmax_attention(q, k, kv[..., nope:], (nope + turned) ** -0.5, seen)
        return self.times(y.reshape(length, -1), f"{name}.o_proj")

    def _picked(self, x: Array, low: Array, seen: Array) -> Array:
        """Whether a query sees a key: the indexer picks the keys with the highest scores."""
        c, name, length = self.c, f"{self.layer}.self_attn.indexer", len(x)
        heads, width, turned = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        rotate = paired if self.model_type == "glm_moe_dsa" else halved
        q = self.times(low, f"{name}.wq_b").reshape(length, heads, width)
        k = self.times(x, f"{name}.wk")
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-5)
        k = k * self.w[f"{name}.k_norm.weight"] + self.w[f"{name}.k_norm.bias"]
        q, k = rotate(q, turned, c["rope_theta"]), rotate(k[:, None], turned, c["rope_theta"])[:, 0]
        scores = np.maximum(np.einsum("qhd,kd->qhk", q, k), 0)
        scores = np.einsum("qhk,qh->qk", scores, self.times(x, f"{name}.weights_proj"))
        scores = np.where(seen, scores, -np.inf)
        picked = np.argsort(-scores, axis=-1, kind="stable")[:, : c["index_topk"]]
        mask = np.zeros((length, length), bool)
        np.put_along_axis(mask, picked, True, -1)
        return mask

    def _feed_forward(self, x: Array) -> Array:
        name = f"{self.layer}.mlp"
        if f"{name}.gate.weight" not in self.w:
            return self._swiglu(x, name)
        c = self.c
        logits = self.times(x, f"{name}.gate")
        is_qwen = self.model_type.startswith("qwen")
        if is_qwen:
            scores = chosen_by = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        else:
            scores = 1 / (1 + np.exp(-logits))
            chosen_by = scores + self.w[f"{name}.gate.e_score_correction_bias"]
        chosen = np.argsort(-chosen_by, -1)[:, : c["num_experts_per_tok"]]
        shares = np.take_along_axis(scores, chosen, -1)
        shares = shares / shares.sum(-1, keepdims=True)
        if is_qwen:
            shared = self._swiglu(x, f"{name}.shared_expert")
            y = shared / (1 + np.exp(-self.times(x, f"{name}.shared_expert_gate")))
        else:
            y = self._swiglu(x, f"{name}.shared_experts")
            shares = shares * c["routed_scaling_factor"]
        for row, (experts, weights) in enumerate(zip(chosen, shares, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                y[row] += weight * self._expert(x[row], name, expert)
        return y

    def _expert(self, x: Array, name: str, expert: int) -> Array:
        if f"{name}.experts.gate_up_proj" not in self.w:
            return self._swiglu(x, f"{name}.experts.{expert}")
        gate, up = np.split(self.w[f"{name}.experts.gate_up_proj"][expert], 2)
        return silu(x @ gate.T) * (x @ up.T) @ self.w[f"{name}.experts.down_proj"][expert].T

    def _swiglu(self, x: Array, name: str) -> Array:
        gated = silu(self.times(x, f"{name}.gate_proj")) * self.times(x, f"{name}.up_proj")
        return self.times(gated, f"{name}.down_proj")


def rms(x: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def causal(length: int) -> Array:
    return np.tri(length, dtype=bool)


def softmax_attention(q: Array, k: Array, v: Array, scale: float, seen: Array) -> Array:
    scores = np.where(seen, np.einsum("qhd,khd->hqk", q, k) * scale, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)


def halved(x: Array, dims: int, base: float) -> Array:
    """RoPE of the first `dims` numbers, which are paired with those half of `dims` further on."""
    return _turned(
        x, dims, base, lambda y: np.split(y, 2, -1), lambda a, b: np.concatenate([a, b], -1)
    )


def paired(x: Array, dims: int, base: float) -> Array:
    """RoPE of the first `dims` numbers, each even one with the next."""
    return _turned(
        x,
        dims,
        base,
        lambda y: (y[..., ::2], y[..., 1::2]),
        lambda a, b: np.stack([a, b], -1).reshape(*a.shape[:-1], -1),
    )


def _turned(
    x: Array, dims: int, base: float, split: Callable[..., Any], join: Callable[..., Array]
) -> Array:
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = split(x[..., :dims])
    return np.concatenate([join(a * cos - b * sin, a * sin + b * cos), x[..., dims:]], -1)
