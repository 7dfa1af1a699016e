"""The scales of a model's LoRA layers: numbers beside the arrays that a trace has as constants."""

from array import array
from functools import reduce
from numbers import Real
from operator import getitem
from typing import Any

import mlx.nn as nn

Path = tuple[str | int, ...]


class LoRAScales:
    """Reads the scales of layers of ``mlx_lm.tuner``, which may change in place."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure: int | None = None  # of the model when the paths were found
        self._paths: list[Path] = []

    def form(self, structure: int) -> int:
        """`structure`, a number of the model's modules and keys, or where there are LoRA layers
        another one for other scales."""
        if structure != self._structure:
            self._structure, self._paths = structure, _paths_in(self._model)
        if not self._paths:
            return structure
        layers: list[Any] = [reduce(getitem, path, self._model) for path in self._paths]
        scales = array("d", [layer.scale for layer in layers])
        return hash((structure, scales.tobytes())) >> 2


def _paths_in(model: nn.Module) -> list[Path]:
    return [
        tuple(int(part) if part.isdecimal() else part for part in path.split("."))
        for path, module in model.named_modules()
        if "lora_a" in module and isinstance(getattr(module, "scale", None), Real)
    ]
