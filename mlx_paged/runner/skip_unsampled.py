"""Logits for the sampled rows only, whatever the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn

HEAD_NAMES = {"lm_head", "embed_out", "output", "head"}
_Kept = TypeVar("_Kept")


class _Wanted(local):
    """What each thread wants of the projection's input; None: all of it."""

    rows: mx.array | None = None
    axis = 0


class LogitRows:
    """Makes a model's output projection compute some of its rows.

    The projection (or the tied embedding) gets a subclass that first picks the wanted rows of its
    input; parameters and the module tree stay as they are. Outside :meth:`only`, and in other
    threads, nothing changes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._wanted = _Wanted()
        for name, module in model.named_modules():
            is_head = name.rsplit(".", 1)[-1] in HEAD_NAMES
            if is_head and isinstance(module, nn.Linear | nn.QuantizedLinear):
                override(module, "__call__", self._project)
            elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                override(module, "as_linear", self._project)

    @classmethod
    def of(cls, model: nn.Module) -> "LogitRows":
        """The model's selector; engines on the same model share it."""
        return attached_to(model, "logit_rows", cls)

    @contextmanager
    def only(self, rows: mx.array | None, axis: int) -> Iterator[None]:
        """Within this context the projection computes `rows` ``[R]`` of its input's `axis`; None:
        all of them."""
        self._wanted.rows, self._wanted.axis = rows, axis
        try:
            yield
        finally:
            self._wanted.rows = None

    def take(self, x: mx.array) -> mx.array:
        """The wanted rows of `x`, in place of those that the projection would be given."""
        rows, self._wanted.rows = self._wanted.rows, None
        return x if rows is None else mx.take(x, rows, axis=self._wanted.axis)

    def _project(self, projection: Callable[..., mx.array], x: mx.array) -> mx.array:
        rows = self._wanted.rows
        return projection(x if rows is None else mx.take(x, rows, axis=self._wanted.axis))


def attached_to(model: nn.Module, name: str, make: Callable[[nn.Module], _Kept]) -> _Kept:
    """What a model has under a name, made when it is first asked for."""
    attribute = f"_mlx_paged_{name}"
    if not hasattr(model, attribute):
        object.__setattr__(model, attribute, make(model))
    kept: _Kept = getattr(model, attribute)
    return kept


def override(module: nn.Module, method: str, replacement: Callable[..., Any]) -> None:
    """Let ``replacement(original, *args, **kwargs)`` answer for a method of this one module, whose
    class becomes a subclass of what it was."""
    base = type(module)
    original = getattr(base, method)

    def overridden(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return replacement(original.__get__(self), *args, **kwargs)

    members = {method: overridden, "__module__": base.__module__}
    module.__class__ = type(base.__name__, (base,), members)


WORTH_SKIPPING = 16
"""Tokens whose last layer takes longer to compute than a layer takes to lay out once more."""


class Caches(Protocol):
    """All caches of a forward whose last layer is called twice."""

    @property
    def num_tokens(self) -> int:
        """Of the forward, each a row."""

    def store_only(self) -> None:
        """The next call of a layer is made for the K/V that it stores."""

    def attend_only(self) -> None:
        """The next call is of the sampled tokens, whose K/V is stored."""


class _Forward(local):
    """Each thread's forward."""

    caches: Caches | None = None


class LastLayer:
    """Makes a model's last layer compute the sampled tokens only.

    What the last layer makes of the other tokens nobody asks for, but for their K/V. So the layer
    is called twice: with all tokens, of which no more than the K/V will ever be computed, as arrays
    are lazy; then with the sampled ones, and what it makes of those goes on to the model's head.
    The layer gets a subclass for that; parameters and the module tree stay as they are. Outside
    :meth:`narrowed`, and in other threads, nothing changes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forward = _Forward()
        self._logit_rows = LogitRows.of(model)
        layer = _last(model)
        if layer is not None:
            override(layer, "__call__", self._call)

    @classmethod
    def of(cls, model: nn.Module) -> "LastLayer":
        """The model's; engines on the same model share it."""
        return attached_to(model, "last_layer", cls)

    @contextmanager
    def narrowed(self, caches: Caches) -> Iterator[None]:
        """Within this context the last layer computes those of its rows that :class:`LogitRows` is
        told to compute."""
        self._forward.caches = caches
        try:
            yield
        finally:
            self._forward.caches = None

    def _call(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        caches = self._forward.caches
        if caches is None or not args or args[0].shape[0] != caches.num_tokens:
            return layer(*args, **kwargs)
        caches.store_only()
        layer(*args, **kwargs)
        caches.attend_only()
        return layer(self._logit_rows.take(args[0]), *args[1:], **kwargs)


def _last(model: nn.Module) -> nn.Module | None:
    """The last of the model's layers, if it says which they are."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list) or not layers or not isinstance(layers[-1], nn.Module):
        return None
    return layers[-1]
