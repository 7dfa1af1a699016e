"""The last layer for the sampled tokens only, whatever the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, Protocol

import mlx.nn as nn

from mlx_paged.runner.skip_unsampled import LogitRows, override, the_models

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
        return the_models(model, "last_layer", cls)

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
