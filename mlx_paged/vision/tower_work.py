"""Operations of a vision tower for a picture, from the shapes of its layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.nn as nn

from mlx_paged.runner.layer_operations import weight_count, weighted_layers

LANGUAGE = "language_model"


@dataclass(frozen=True, slots=True)
class TowerWork:
    """What the layers that see pictures compute.

    Attributes:
        patch: operations of the products for a patch. Layers after patches were merged count as if
            they were not.
        pair: operations of attention for two patches, in all layers.
        inputs: numbers of a patch.
    """

    patch: int
    pair: int
    inputs: int

    @classmethod
    def of(cls, model: nn.Module) -> "TowerWork":
        """The work of a model of mlx-vlm without its language model."""
        total, inputs, width, blocks = 0, 0, 0, set[str]()
        for name, layer in weighted_layers(model):
            if name.startswith(LANGUAGE) or isinstance(layer, nn.Embedding | nn.QuantizedEmbedding):
                continue
            count = weight_count(layer)
            total += count
            if not inputs:  # the first layer makes vectors of patches
                width = layer.weight.shape[0]
                inputs = count // width
            parts = name.split(".")
            numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
            blocks.update(".".join(parts[: i + 1]) for i in numbers[:1])
        return cls(2 * total, 4 * width * len(blocks), max(1, inputs))

    def of_inputs(self, inputs: Mapping[str, Any]) -> int:
        """The operations for a picture with these inputs. Its tiles do not see each other."""
        pixels = inputs.get("pixel_values")
        if pixels is None:
            return self.patch
        of_tile = prod(pixels.shape[-3:]) if len(pixels.shape) > 3 else pixels.size
        if of_tile <= self.inputs:  # the array has patches instead of tiles
            of_tile = pixels.size
        tiles, patches = pixels.size / of_tile, of_tile / self.inputs
        return int(tiles * patches * (self.patch + patches * self.pair))
