"""How published checkpoints name and combine the tensors of their MTP heads. Knows no mlx."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

OPTIONAL = ("embed_tokens", "output")
"""Parts that a checkpoint may leave to the model."""


@dataclass(frozen=True)
class Layout:
    """The head of an architecture. docs/mtp-heads.md names the sources of each line.

    Attributes:
        parts: of the head's modules beside its decoder layer, what their tensors are named without
            ``.weight``. ``{layer}`` is the number of the model's layers.
        layer: how the names of the decoder layer's tensors begin.
        decoder: module of mlx-lm and its class that computes the decoder layer.
        arguments: module of mlx-lm and its class of what the decoder layer takes.
        changes: arguments with which `decoder` builds the head's layer.
        index: of the layer, as the class takes it; None: it takes none; -1: the number of layers.
        embedding_first: whether the projection reads the embedding before the hidden state.
        feeds_back_normed: whether the next guess of the head reads its normed hidden state.
        norms_less_one: whether norms are stored less 1.
        num_experts: field of the configuration that counts the experts of a layer.
        is_latent: whether the attention is latent: it wants its mask as an array.
        is_indexed: whether an indexer has a cache beside that of the attention.
    """

    parts: Mapping[str, str]
    layer: str
    decoder: str = ""
    arguments: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    index: int | None = -1
    embedding_first: bool = True
    feeds_back_normed: bool = True
    norms_less_one: bool = False
    num_experts: str = "n_routed_experts"
    is_latent: bool = False
    is_indexed: bool = False


QWEN = Layout(
    parts={
        "embedding_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "projection": "mtp.fc",
        "norm": "mtp.norm",
    },
    layer="mtp.layers.0",
    decoder="qwen3_5.DecoderLayer",
    arguments="qwen3_5.TextModelArgs",
    changes={"full_attention_interval": 1},
    index=0,
    norms_less_one=True,
    num_experts="num_experts",
)
NEXTN = Layout(
    parts={
        "embedding_norm": "model.layers.{layer}.enorm",
        "hidden_norm": "model.layers.{layer}.hnorm",
        "projection": "model.layers.{layer}.eh_proj",
        "norm": "model.layers.{layer}.shared_head.norm",
        "embed_tokens": "model.layers.{layer}.embed_tokens",
        "output": "model.layers.{layer}.shared_head.head",
    },
    layer="model.layers.{layer}",
    feeds_back_normed=False,
)
SPARSE = replace(
    NEXTN,
    decoder="deepseek_v32.DeepseekV32DecoderLayer",
    is_latent=True,
    is_indexed=True,
)

LAYOUTS = {
    "qwen3_next": replace(
        QWEN,
        decoder="qwen3_next.Qwen3NextDecoderLayer",
        arguments="qwen3_next.ModelArgs",
        changes={"full_attention_interval": 1, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "deepseek_v3": replace(
        NEXTN,
        decoder="deepseek_v3.DeepseekV3DecoderLayer",
        arguments="deepseek_v3.ModelArgs",
        is_latent=True,
    ),
    "deepseek_v32": replace(SPARSE, arguments="deepseek_v32.ModelArgs"),
    "glm_moe_dsa": replace(SPARSE, arguments="glm_moe_dsa.ModelArgs"),
    "glm4_moe": replace(NEXTN, decoder="glm4_moe.DecoderLayer", arguments="glm4_moe.ModelArgs"),
    "mimo": Layout(
        parts={
            "embedding_norm": "model.mtp_layers.0.token_layernorm",
            "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
            "projection": "model.mtp_layers.0.input_proj",
            "norm": "model.mtp_layers.0.final_layernorm",
        },
        layer="model.mtp_layers.0",
        decoder="mimo.TransformerBlock",
        arguments="mimo.ModelArgs",
        index=None,
        embedding_first=False,
    ),
    "ernie4_5_moe": Layout(
        parts={
            "embedding_norm": "model.mtp_emb_norm.0",
            "hidden_norm": "model.mtp_hidden_norm.0",
            "projection": "model.mtp_linear_proj.0",
        },
        layer="model.mtp_block.0",
        decoder="ernie4_5_moe.Ernie4_5_DecoderLayer",
        arguments="ernie4_5_moe.ModelArgs",
        changes={"moe_layer_start_index": 1},
        index=0,
    ),
}
"""The layout of each architecture, by the target's ``model_type``."""

UNREAD = {
    "deepseek_v4": "mlx-lm has no such model",
    "deepseek_v41": "no engine can page the caches of its layers",
}
"""Architectures whose published heads are not read, and why."""


def layout_of(model_type: str) -> Layout:
    """The layout of an architecture. Raises ValueError if none is known."""
    if model_type in LAYOUTS:
        return LAYOUTS[model_type]
    why = f": {UNREAD[model_type]}" if model_type in UNREAD else ""
    raise ValueError(
        f"heads of {model_type} are not read{why}: expected one of {', '.join(sorted(LAYOUTS))}"
    )
