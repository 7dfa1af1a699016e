"""Logits for the sampled rows only, whatever the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

HEAD_NAMES = {"lm_head", "embed_out", "output", "head"}
_ATTRIBUTE = "_mlx_paged_logit_rows"


class LogitRows:
    """Makes a model's output projection compute some of its rows.

    The projection (or the tied embedding) gets a subclass that first picks the wanted rows of its
    input; parameters and the module tree stay as they are. Outside :meth:`only` nothing changes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows: mx.array | None = None
        self._axis = 0
        for name, module in model.named_modules():
            is_head = name.rsplit(".", 1)[-1] in HEAD_NAMES
            if is_head and isinstance(module, nn.Linear | nn.QuantizedLinear):
                _override(module, "__call__", self._pick)
            elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                _override(module, "as_linear", self._pick)

    @classmethod
    def of(cls, model: nn.Module) -> "LogitRows":
        """The model's selector; engines on the same model share it."""
        if not hasattr(model, _ATTRIBUTE):
            object.__setattr__(model, _ATTRIBUTE, cls(model))
        selector: LogitRows = getattr(model, _ATTRIBUTE)
        return selector

    @contextmanager
    def only(self, rows: mx.array | None, axis: int) -> Iterator[None]:
        """Within this context the projection computes `rows` ``[R]`` of its input's `axis`; None:
        all of them."""
        self._rows, self._axis = rows, axis
        try:
            yield
        finally:
            self._rows = None

    def _pick(self, x: mx.array) -> mx.array:
        return x if self._rows is None else mx.take(x, self._rows, axis=self._axis)


def _override(module: nn.Module, method: str, pick: Any) -> None:
    base = type(module)
    original = getattr(base, method)

    def projection(self: nn.Module, x: mx.array) -> mx.array:
        logits: mx.array = original(self, pick(x))
        return logits

    module.__class__ = type(base.__name__, (base,), {method: projection})
