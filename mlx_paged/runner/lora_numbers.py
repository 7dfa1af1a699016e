"""The numbers of a model's LoRA layers, which a trace has as constants."""

from array import array
from functools import reduce
from numbers import Real
from operator import getitem
from typing import Any

import mlx.nn as nn

Path = tuple[str | int, ...]


class LoRANumbers:
    """Reads the `scale` of each layer of ``mlx_lm.tuner``, which may change in place.

    Attributes:
        absent_in: a structure of the model that has no such layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure: int | None = None  # of the model when the paths were found
        self._paths: list[Path] = []
        self.absent_in: int | None = None

    def form(self, structure: int) -> int:
        """A number that differs where a trace does not fit: where the model's modules and keys
        differ, which `structure` tells, or the scales of its LoRA layers."""
        if structure != self._structure:
            self._structure, self._paths = structure, _paths_in(self._model)
        if not self._paths:
            self.absent_in = structure
            return structure
        layers: list[Any] = [reduce(getitem, path, self._model) for path in self._paths]
        numbers = array("d", [layer.scale for layer in layers])
        return hash((structure, numbers.tobytes())) >> 2


def _paths_in(model: nn.Module) -> list[Path]:
    return [
        tuple(int(part) if part.isdecimal() else part for part in path.split("."))
        for path, module in model.named_modules()
        if "lora_a" in module and isinstance(getattr(module, "scale", None), Real)
    ]
