"""Prompts with images: tokens, pictures, and where both are."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.vision.sight import Picture, SeenPrompt, Sight


def seen_prompt(vlm: Any, tokens: Sequence[int], pictures: Sequence[Picture]) -> SeenPrompt:
    """A prompt of a model of mlx-vlm.

    Args:
        tokens: those of the pictures included, which are the image tokens in their order.
        pictures: what the image tokens show.
    """
    is_image = np.isin(tokens, image_tokens(vlm.config))
    positions, delta = None, 0
    if hasattr(vlm.language_model, "get_rope_index"):
        grids = [each.inputs["image_grid_thw"] for each in pictures]
        ids = mx.array([tokens])
        found, deltas = vlm.language_model.get_rope_index(
            ids,
            image_grid_thw=mx.array(np.concatenate(grids)),
            attention_mask=mx.ones_like(ids),
        )
        positions, delta = np.array(found, np.int32)[:, 0], int(np.array(deltas).reshape(-1)[0])
    return SeenPrompt(tokens, Sight(tokens, pictures, is_image, positions, delta))


def image_tokens(config: Any) -> list[int]:
    """The ids of tokens that stand for an image's features."""
    names = ("image_token_id", "image_token_index")
    return [getattr(config, name) for name in names if getattr(config, name, None) is not None]
