"""MTP heads: one decoder layer that reads the target's last state and the next token."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache

from mlx_paged.heads.head import NORMED, Head
from mlx_paged.heads.mtp_layouts import Layout, layout_of

Map = Callable[[mx.array], mx.array]
SAME = ("hidden_size", "vocab_size", "num_hidden_layers")
"""Sizes that the configurations of a head and of its target share."""
MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, OverflowError),
    *(TypeError, ValueError),
)
"""What mlx-lm's classes raise for a configuration that is none of theirs."""


class MTPHead(Head):
    """A head that a model was trained with, to predict the token after the next one (DeepSeek-V3
    technical report, arXiv:2412.19437, section 2.2). The decoder layer is the class that mlx-lm has
    for the architecture.

    Attributes:
        model_type: of the target.
        config: of the target.
        embedding_norm: of the token's embedding.
        hidden_norm: of the target's state, or of the state that is fed back.
        projection: ``[D, 2 D]``, of both.
        norm: before the output; None: the target's final norm.
        embed_tokens: the head's own embeddings; None: those of the target.
        output: the head's own output projection; None: that of the target.
    """

    def __init__(self, model_type: str, config: dict[str, Any], own: set[str]) -> None:
        """A head with random weights.

        Args:
            model_type: of the target.
            config: of the target, as its config.json has it.
            own: which of ``embed_tokens`` and ``output`` the head has itself.

        Raises:
            ValueError: the configuration is not one of the architecture.
        """
        super().__init__()
        self.model_type, self._config = model_type, config
        self.layout = layout = layout_of(model_type)
        self.states = (NORMED,)
        try:
            self.arguments = arguments = _arguments(layout, config)
            self.layers = [_decoder_layer(layout, arguments)]
            width, eps = arguments.hidden_size, arguments.rms_norm_eps
            self.embedding_norm = nn.RMSNorm(width, eps)
            self.hidden_norm = nn.RMSNorm(width, eps)
            self.projection = nn.Linear(2 * width, width, bias=False)
            if "norm" in layout.parts:
                self.norm = nn.RMSNorm(width, eps)
            if "embed_tokens" in own:
                self.embed_tokens = nn.Embedding(arguments.vocab_size, width)
            if "output" in own:
                self.output = nn.Linear(width, arguments.vocab_size, bias=False)
        except MISTAKES as error:
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"the configuration is none of {model_type} ({detail})") from error
        mx.eval(mx.random.state)  # else it keeps the graphs that drew the weights

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = self._config
        return config

    def bind(self, target: nn.Module) -> None:
        self._require_base(target)
        text = getattr(target, "language_model", target)
        inner = text.model
        self._shared_embed: Map = lambda tokens: inner.embed_tokens(tokens)
        self._shared_norm: Map = lambda hidden: inner.norm(hidden)
        self._shared_output: Map = lambda normed: inner.embed_tokens.as_linear(normed)
        if "lm_head" in text:
            self._shared_output = lambda normed: text.lm_head(normed)

    def _require_base(self, target: nn.Module) -> None:
        """Raise ValueError unless the target is a model as that of the head."""
        text = getattr(target, "language_model", target)
        found = getattr(text, "args", None) or getattr(text, "config", None)
        kind = getattr(target, "model_type", None) or getattr(found, "model_type", None)
        if kind != self.model_type:
            raise ValueError(f"the head is of a {self.model_type}: the model is a {kind}")
        for name in SAME:
            own, other = getattr(self.arguments, name), getattr(found, name, None)
            if own != other:
                raise ValueError(f"the head has {name} {own}: the model has {other}")

    def make_cache(self) -> list[Any]:
        if self.layout.is_indexed:
            return [CacheList(KVCache(), KVCache())]
        return [KVCache()]

    def embed(self, tokens: mx.array) -> mx.array:
        own: mx.array = (self.get("embed_tokens") or self._shared_embed)(tokens)
        return own

    def fuse(self, states: list[mx.array]) -> mx.array:
        return states[0]

    def __call__(self, fused: mx.array, embeddings: mx.array, cache: list[Any]) -> mx.array:
        both = [self.embedding_norm(embeddings), self.hidden_norm(fused)]
        if not self.layout.embedding_first:
            both.reverse()
        x = self.projection(mx.concatenate(both, -1))
        own = cache[0][0] if self.layout.is_indexed else cache[0]
        mask = create_attention_mask(x, own, return_array=self.layout.is_latent)
        hidden: mx.array = self.layers[0](x, mask, cache[0])
        return hidden

    def feed_back(self, hidden: mx.array) -> mx.array:
        return self.normed(hidden) if self.layout.feeds_back_normed else hidden

    def logits(self, hidden: mx.array) -> mx.array:
        logits: mx.array = (self.get("output") or self._shared_output)(self.normed(hidden))
        return logits

    def normed(self, hidden: mx.array) -> mx.array:
        """Hidden states as the output projection reads them."""
        normed: mx.array = (self.get("norm") or self._shared_norm)(hidden)
        return normed


def _class(name: str) -> Any:
    module, _, of_module = name.partition(".")
    return getattr(import_module(f"mlx_lm.models.{module}"), of_module)


def _arguments(layout: Layout, config: dict[str, Any]) -> Any:
    arguments = _class(layout.arguments).from_dict(deepcopy(config))
    return replace(arguments, **layout.changes)


def _decoder_layer(layout: Layout, arguments: Any) -> nn.Module:
    index = arguments.num_hidden_layers if layout.index == -1 else layout.index
    layer: nn.Module = _class(layout.decoder)(arguments, *[] if index is None else [index])
    return layer
