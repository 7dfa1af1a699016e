"""Heads of EAGLE-3 (Li et al. 2025, arXiv:2503.01840) in the two published layouts.

EAGLE's own layout has ``midlayer.*`` and a flat configuration, as vLLM's and SGLang's
``llama_eagle3.py`` read it. The layout of speculators has ``layers.0.*`` and its layer's
configuration under ``transformer_layer_config``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from mlx_paged.heads.head import Head

LAYERS = {"llama": llama, "qwen3": qwen3}
"""mlx-lm's modules with the layer of a head, by ``model_type``."""

# The known keys of a configuration: those of the head, those of its layer, and those that change no
# guess. Then those of ``eagle_config``.
OF_HEAD = {
    *("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_config"),
}
OF_LAYER = {
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "vocab_size"),
    *("max_position_embeddings", "tie_word_embeddings"),
}
WITHOUT_EFFECT = {
    *("architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "use_cache"),
    *("initializer_range", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("attention_dropout", "speculators_config", "speculators_version", "speculators_model_type"),
    *("embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init", "max_window_layers"),
    *(
        "base_model_ep_plan",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "layer_types",
    ),
    *("_name_or_path", "id2label", "label2id", "use_sliding_window", "sliding_window"),
}
OF_EAGLE_CONFIG = {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_fc"}


class Eagle3Layer(nn.Module):
    """The head's layer. Its attention reads the embedding and the states, one beside the other."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        module = LAYERS[config["model_type"]]
        args = module.ModelArgs.from_dict(dict(config))
        width, eps = args.hidden_size, args.rms_norm_eps
        self.self_attn = module.Attention(args)
        for name in ("q_proj", "k_proj", "v_proj"):
            made = self.self_attn[name]
            rows = made.weight.shape[0]
            self.self_attn[name] = nn.Linear(2 * width, rows, bias="bias" in made)
        if module is qwen3:
            self.mlp = qwen3.MLP(width, args.intermediate_size)
        else:
            self.mlp = llama.MLP(args)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self._norms_residual = bool(config.get("norm_before_residual"))

    def __call__(
        self, states: mx.array, embeddings: mx.array, mask: Any, cache: KVCache | None
    ) -> mx.array:
        normed = self.hidden_norm(states)
        hidden = normed if self._norms_residual else states
        both = mx.concatenate([self.input_layernorm(embeddings), normed], axis=-1)
        hidden = hidden + self.self_attn(both, mask, cache)
        result: mx.array = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class Eagle3Head(Head):
    """A head of EAGLE-3.

    Args:
        config: the head's, with the names of EAGLE's own layout.
        num_layers: of the target.
        has_embeddings: whether the head has embeddings of its own.
    """

    def __init__(
        self, config: Mapping[str, Any], num_layers: int, has_embeddings: bool = False
    ) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        self.states = tuple(ids or (2, num_layers // 2, num_layers - 3))
        self.target_width = config.get("target_hidden_size") or width
        self.vocab_size = config["vocab_size"]
        fused = self.target_width * len(self.states)
        self.layers = [Eagle3Layer(config)]
        self.fc = nn.Linear(fused, width, bias=False)
        if config.get("norm_before_fc"):
            self.input_norm = nn.RMSNorm(fused, eps=eps)
        if config.get("fc_norm"):
            self.fc_norm = [nn.RMSNorm(self.target_width, eps=eps) for _ in self.states]
        self.norm = nn.RMSNorm(width, eps=eps)
        self._feeds_normed = bool(config.get("norm_output"))
        self.lm_head = nn.Linear(
            width, config.get("draft_vocab_size") or self.vocab_size, bias=False
        )
        if has_embeddings:
            self.embed_tokens = nn.Embedding(self.vocab_size, width)
        self._embed: Callable[[mx.array], mx.array] = self._own_embeddings
        self._target_ids: mx.array | None = None

    @property
    def target_ids(self) -> mx.array | None:  # type: ignore[override]
        return self._target_ids

    def bind(self, target: nn.Module) -> None:
        embeddings = _embeddings_of(target)
        rows, width = embeddings.weight.shape[0], _width_of(embeddings)
        if self.target_width != width:
            raise ValueError(
                f"[Engine] draft_head reads states of {self.target_width} numbers: expected "
                f"{width}, as many as the model's have"
            )
        if self.vocab_size > rows or (self.has_embeddings and self.vocab_size < rows):
            raise ValueError(
                f"[Engine] draft_head has a vocabulary of {self.vocab_size} tokens: expected "
                f"{rows}, as many as the model has"
            )
        if not self.has_embeddings:
            if self.norm.weight.shape[0] != width:
                raise ValueError(
                    f"[Engine] draft_head has a width of {self.norm.weight.shape[0]} and no "
                    f"embed_tokens.weight: expected one, because the model's width is {width}"
                )
            self._embed = lambda tokens: embeddings(tokens)
        if any(isinstance(module, nn.QuantizedLinear) for module in self.modules()):
            # Scales of the model's type have the fast products that the model has.
            self.set_dtype(embeddings(mx.array([0])).dtype)

    @property
    def has_embeddings(self) -> bool:
        return "embed_tokens" in self

    def _own_embeddings(self, tokens: mx.array) -> mx.array:
        embeddings: mx.array = self.embed_tokens(tokens)
        return embeddings

    def embed(self, tokens: mx.array) -> mx.array:
        return self._embed(tokens).astype(self.norm.weight.dtype)

    def fuse(self, states: list[mx.array]) -> mx.array:
        if "fc_norm" in self:
            states = [norm(each) for norm, each in zip(self.fc_norm, states, strict=True)]
        joined = mx.concatenate(states, axis=-1).astype(self.norm.weight.dtype)
        fused: mx.array = self.fc(self.input_norm(joined) if "input_norm" in self else joined)
        return fused

    def __call__(self, fused: mx.array, embeddings: mx.array, cache: list[KVCache]) -> mx.array:
        mask = create_attention_mask(fused, cache[0])
        hidden: mx.array = self.layers[0](fused, embeddings, mask, cache[0])
        return hidden

    def feed_back(self, hidden: mx.array) -> mx.array:
        return self.norm(hidden) if self._feeds_normed else hidden

    def logits(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self.lm_head(self.norm(hidden))
        return logits

    def load(self, weights: Mapping[str, mx.array]) -> None:
        """Take the tensors of a file in either layout.

        Raises:
            ValueError: one is missing, has another shape or is unknown. It names the tensor.
        """
        own = dict(tree_flatten(self.parameters()))
        given = {_own_name(name): (name, array) for name, array in weights.items()}
        offsets = given.pop("d2t", None)
        given.pop("t2d", None)
        if unknown := [given[name][0] for name in given if name not in own]:
            raise ValueError(f"draft head has the unknown tensor {sorted(unknown)[0]}")
        if missing := [name for name in own if name not in given]:
            raise ValueError(f"draft head has no tensor {sorted(missing)[0]}")
        for name, (full, array) in given.items():
            if array.shape != own[name].shape:
                raise ValueError(
                    f"tensor {full} of the draft head has the shape {array.shape}: expected "
                    f"{own[name].shape}"
                )
        self.load_weights([(name, array) for name, (_, array) in given.items()])
        columns = self.lm_head.weight.shape[0]
        if offsets is not None:
            self._target_ids = _target_ids(offsets[1], columns, self.vocab_size)
        elif columns != self.vocab_size:
            raise ValueError(
                f"draft head guesses {columns} of {self.vocab_size} tokens and has no tensor d2t"
            )
        self.eval()


def _target_ids(offsets: mx.array, columns: int, vocab_size: int) -> mx.array:
    """The target's id of each of `columns` ids of a head, of which ``d2t`` has the differences."""
    if offsets.shape != (columns,):
        raise ValueError(
            f"tensor d2t of the draft head has the shape {offsets.shape}: expected ({columns},)"
        )
    ids = mx.arange(columns) + offsets.astype(mx.int32)
    if not mx.all((ids >= 0) & (ids < vocab_size)).item():
        raise ValueError(f"tensor d2t of the draft head leads to ids outside [0, {vocab_size})")
    return ids.astype(mx.int32)


def _own_name(name: str) -> str:
    """This module's name of a tensor."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _embeddings_of(target: nn.Module) -> nn.Module:
    """The target's token embeddings: the ones with the most rows."""
    found = [m for m in target.modules() if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
    if not found:
        raise ValueError("[Engine] draft_head needs a model with token embeddings")
    return max(found, key=lambda module: module.weight.shape[0])


def _width_of(embeddings: nn.Module) -> int:
    if isinstance(embeddings, nn.QuantizedEmbedding):
        return int(embeddings.dims)
    return int(embeddings.weight.shape[1])


def eagle3_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A head's configuration of either layout, with the names of EAGLE's own.

    Raises:
        ValueError: it says something that this package does not compute; it names the key.
    """
    flat = {key: value for key, value in config.items() if key != "transformer_layer_config"}
    layer = dict(config.get("transformer_layer_config") or {})
    layer.pop("tie_word_embeddings", None)
    flat |= layer
    inner = flat.pop("eagle_config", None) or {}
    for key in inner:
        if key not in OF_EAGLE_CONFIG:
            raise ValueError(f"draft head: eagle_config has the unknown key {key}")
    if inner.pop("use_aux_hidden_state", True) is not True:
        raise ValueError("draft head: use_aux_hidden_state is false: expected true")
    flat |= inner
    known = OF_HEAD | OF_LAYER | WITHOUT_EFFECT
    if unknown := [key for key in flat if key not in known]:
        raise ValueError(f"draft head: its configuration has the unknown key {sorted(unknown)[0]}")
    found = {key: value for key, value in flat.items() if key in OF_HEAD | OF_LAYER}
    found.setdefault("model_type", "llama")
    if layer and "model_type" in layer:
        found["model_type"] = layer["model_type"]
    if found["model_type"] not in LAYERS:
        expected = " or ".join(LAYERS)
        raise ValueError(f"draft head: model_type is {found['model_type']}: expected {expected}")
    known_values: dict[str, Any] = {"num_hidden_layers": 1, "hidden_act": "silu"}
    for key, value in known_values.items():
        if found.setdefault(key, value) != value:
            raise ValueError(f"draft head: {key} is {found[key]}: expected {value}")
    if found.get("tie_word_embeddings"):
        raise ValueError("draft head: tie_word_embeddings is true: expected false")
    found["tie_word_embeddings"] = False
    rope = found.pop("rope_parameters", None)
    if rope:
        found["rope_theta"] = rope.get("rope_theta", found.get("rope_theta", 10000.0))
        others = {key: value for key, value in rope.items() if key != "rope_theta"}
        if others.get("rope_type", "default") != "default":
            found.setdefault("rope_scaling", others)
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not isinstance(found.get(key), int) or found[key] < 1:
            raise ValueError(f"draft head: {key} is {found.get(key)}: expected a whole number")
    found.setdefault("rms_norm_eps", 1e-6)
    if not found.get("num_key_value_heads"):
        found["num_key_value_heads"] = found["num_attention_heads"]
    if not found.get("head_dim"):
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    if not found.get("max_position_embeddings"):
        found["max_position_embeddings"] = 4096
    found.setdefault("rope_theta", 10000.0)
    return found
