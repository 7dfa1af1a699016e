"""The hidden states of a model's forwards, which heads read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import local
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.heads.head import NORMED
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.runner.batch import Batch
from mlx_paged.runner.skip_unsampled import attached_to, override
from mlx_paged.scheduler.step import Span

FINAL_NORMS = {"norm", "final_norm", "final_layernorm", "ln_f", "norm_f"}
"""Names of the modules, outside of the layers, that compute a model's final norm."""


class _Found(local):
    """What the layers of each thread's forward were given; None: no forward is watched."""

    given: dict[int, mx.array] | None = None


class WatchedModel:
    """Watches the layers of a model: their inputs, the output of the last one, the final norm's.

    The modules that are watched get subclasses. Parameters and the module tree do not change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = _Found()
        self._watched = set[int]()
        self._layers: list[nn.Module] = list(getattr(model, "layers", []))
        inside = {id(module) for layer in self._layers for module in layer.modules()}
        norms = [
            module
            for name, module in model.named_modules()
            if name.rpartition(".")[2] in FINAL_NORMS and id(module) not in inside
        ]
        self._norm = norms[0] if len(norms) == 1 else None

    @classmethod
    def of(cls, model: nn.Module) -> "WatchedModel":
        """The model's own; engines on the same model share it."""
        return attached_to(model, "hidden_states", cls)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def watch(self, states: Sequence[int]) -> None:
        """Watch these states, see ``Head.states``, from now on.

        Raises:
            ValueError: the model has no such state.
        """
        count = len(self._layers)
        for each in sorted({*states} - self._watched):
            if not (NORMED <= each <= count) or not count or (each == NORMED and not self._norm):
                known = f"inputs of layers 0 to {count - 1}, {count} for the output of the last one"
                raise ValueError(f"the head reads state {each}: expected {known}")
            if each == NORMED:
                assert self._norm is not None
                override(self._norm, "__call__", self._output_as(NORMED))
            elif each == count:
                override(self._layers[-1], "__call__", self._output_as(count))
            else:
                override(self._layers[each], "__call__", self._input_as(each))
            self._watched.add(each)

    @contextmanager
    def forward(self) -> Iterator[dict[int, mx.array]]:
        """A context of a forward: the states by their numbers, each ``[B, L, ...]``."""
        found: dict[int, mx.array] = {}
        self._found.given = found
        try:
            yield found
        finally:
            self._found.given = None

    def _input_as(self, number: int) -> Any:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            states = self._found.given
            if states is not None and args:  # the last layer may be called twice: all rows first
                states.setdefault(number, args[0])
            return layer(*args, **kwargs)

        return call

    def _output_as(self, number: int) -> Any:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            result, states = layer(*args, **kwargs), self._found.given
            if states is not None:
                states.setdefault(number, result[0] if isinstance(result, tuple) else result)
            return result

        return call


@dataclass(eq=False, slots=True)
class ForwardStates:
    """The states that a forward leaves.

    Attributes:
        spans: of the sequences, in the order of their rows.
        first_rows: ``[S]`` int32, on the host: of each span its first row.
        arrays: ``[B, L, ...]`` each, with rows of padding at the end.
    """

    spans: Sequence[Span]
    first_rows: Int32Array
    arrays: list[mx.array]


class HiddenStates:
    """The states that a runner's forwards leave for a head.

    Attributes:
        wanted: the states, see ``Head.states``; none: nothing is watched.
        needs_all_rows: whether the last layer has to compute all rows.
        found: those of the latest forward, ``[B, L, ...]`` each, in the order of `wanted`.
        forward: makes the context of a forward; `found` are its states afterwards.
    """

    def __init__(self, model: nn.Module, wanted: Sequence[int] = ()) -> None:
        self.wanted = wanted
        self.found: list[mx.array] = []
        self.needs_all_rows = False
        self.forward: Callable[[], AbstractContextManager[None]] = nullcontext
        if wanted:
            self.forward = self._watched_forward
            self._watched = WatchedModel.of(model)
            self._watched.watch(wanted)
            self.needs_all_rows = not {NORMED, self._watched.num_layers}.isdisjoint(wanted)

    def forms(self, model: nn.Module) -> list[mx.array]:
        """A forward's states of one token, ``[1, 1, ...]`` each, which are not evaluated."""
        with self.forward():
            model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))
        return self.found

    @contextmanager
    def _watched_forward(self) -> Iterator[None]:
        with self._watched.forward() as states:
            yield
        self.found = [states[each] for each in self.wanted]

    def narrows(self, profile: Any) -> bool:
        """Whether the last layer may compute the sampled rows alone."""
        return bool(profile.last_layer_narrows) and not self.needs_all_rows

    def left_by(self, batch: Batch) -> list[ForwardStates]:
        """What the latest forward, which was of this batch, leaves. Something is wanted."""
        found, self.found = self.found, []
        return [ForwardStates(batch.spans, batch.first_rows, found)]
