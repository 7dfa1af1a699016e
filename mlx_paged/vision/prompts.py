"""Makes prompts with images. Any thread may make them."""

from collections.abc import Sequence
from hashlib import blake2b
from threading import Lock
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlx_paged import ops
from mlx_paged.chat.encoding import mark_places
from mlx_paged.chat.marks import divided, spare
from mlx_paged.prompt import Prompt
from mlx_paged.vision.image_spans import ImageSpans, Picture
from mlx_paged.vision.images import opened

PLACEHOLDERS = ("<image>", "<|image|>", "[IMG]")
INTERNAL = "<|placeholder|>"
"""Stands for an image token in some processors while they work; no prompt has such a place."""


class ImageProcessor:
    """Makes prompts of text and images by a processor of mlx-vlm.

    Attributes:
        adds_special: mlx-vlm lets the tokenizer add special tokens to a chat of text, beside those
            of the chat template.
    """

    def __init__(self, vlm: Any, processor: Any) -> None:
        from mlx_vlm.utils import should_add_special_tokens

        self._vlm, self._processor = vlm, processor
        self.adds_special = bool(should_add_special_tokens(vlm.config.model_type, processor))
        self._lock = Lock()  # a processor serves one thread at a time

    def __call__(self, prompt: str, images: Sequence[Any]) -> Prompt:
        """A prompt with a place for each image.

        Args:
            prompt: of a chat, a :class:`mlx_paged.chat.marks.Rendered`, or any other text.
            images: those of the places, in their order.

        Raises:
            ValueError: an image cannot be read, or the prompt has other places.
        """
        pixels = opened(images)
        try:
            with self._lock:
                return self._read(prompt, pixels)
        except Exception as error:  # a processor can raise anything
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(f"the model's processor refuses the images: {reason}") from error

    def _read(self, prompt: str, pixels: Sequence[Any]) -> Prompt:
        mark = spare([prompt])
        marked = divided(prompt, mark).replace(INTERNAL, f"<{mark}{INTERNAL[1:]}")
        tokens, whole = self._processed(marked, pixels)
        if marked != prompt:
            tokens, whole = self._without_marks(mark, tokens, whole)
        alone = self._alone(marked, pixels)
        num_places = int(np.isin(tokens, image_tokens(self._vlm.config, whole)).sum())
        if not num_places or not whole:
            raise ValueError("the prompt has no place for an image")
        if sum(len(picture.rows) for picture in alone) != num_places:
            if len(alone) == 1:
                raise ValueError("the prompt has more places than the image takes")
            alone = [self._picture(tokens, whole)]
        return image_prompt(self._vlm, tokens, alone)

    def _without_marks(
        self, mark: str, tokens: list[int], inputs: dict[str, Any]
    ) -> tuple[list[int], dict[str, Any]]:
        """Tokens and inputs without those of marks. A mark that has no token of its own stays."""
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        left_out = [at for place in mark_places(tokenizer, mark, tokens) for at in place]
        of_tokens = (1, len(tokens))

        def shortened(value: Any) -> Any:
            return np.delete(value, left_out, 1) if np.shape(value)[:2] == of_tokens else value

        return np.delete(tokens, left_out).tolist(), tree_map(shortened, inputs)

    def _alone(self, prompt: str, pixels: Sequence[Any]) -> list[Picture]:
        """A picture for each image; none if it is unknown how a prompt names one."""
        names = (getattr(self._processor, name, None) for name in ("image_token", "boi_token"))
        known = [name for name in (*names, *PLACEHOLDERS) if isinstance(name, str)]
        place = next((name for name in known if prompt.count(name) == len(pixels)), None)
        if place is None:
            return []
        return [self._picture(*self._processed(place, [image])) for image in pixels]

    def _picture(self, tokens: list[int], inputs: dict[str, Any]) -> Picture:
        """What the model sees of images: two with equal inputs have equal features."""
        digest = blake2b(digest_size=32)
        for name, value in tree_flatten(dict(sorted(inputs.items()))):
            digest.update(f"{name} {getattr(value, 'dtype', '')} {np.shape(value)}".encode())
            digest.update(np.asarray(value).tobytes())
        rows = np.flatnonzero(np.isin(tokens, image_tokens(self._vlm.config, inputs)))
        digest.update(f"{len(rows)}".encode())
        return Picture(digest.digest(), np.array(tokens, np.int32), rows, inputs)

    def _processed(self, prompt: str, pixels: Sequence[Any]) -> tuple[list[int], dict[str, Any]]:
        """Tokens, and the arguments of `get_input_embeddings` as NumPy arrays."""
        from mlx_vlm.utils import prepare_inputs

        found = prepare_inputs(
            self._processor,
            images=list(pixels),
            prompts=prompt,
            image_token_index=getattr(self._vlm.config, "image_token_index", None),
            add_special_tokens=self.adds_special,
        )
        tokens = np.array(_as_numpy(found.pop("input_ids"))).reshape(-1).tolist()
        kept = {
            name: tree_map(_as_numpy, value)
            for name, value in found.items()
            if value is not None and name != "attention_mask" and "token_type" not in name
        }
        return tokens, kept


def image_prompt(vlm: Any, tokens: Sequence[int], pictures: Sequence[Picture]) -> Prompt:
    """A prompt of a model of mlx-vlm.

    Args:
        tokens: those of the pictures included, which are the image tokens in their order.
        pictures: what the image tokens show.
    """
    is_image = np.isin(tokens, image_tokens(vlm.config, pictures[0].inputs))
    positions, delta = None, 0
    if hasattr(vlm.language_model, "get_rope_index"):
        grids = [each.inputs["image_grid_thw"] for each in pictures]
        ids = mx.array([tokens])
        found, deltas = vlm.language_model.get_rope_index(
            ids,
            image_grid_thw=mx.array(np.concatenate(grids)),
            attention_mask=mx.ones_like(ids),
        )
        positions = np.array(_as_numpy(found), np.int32)[:, 0]
        delta = int(np.reshape(_as_numpy(deltas), -1)[0])
    spans = ImageSpans(tokens, pictures, is_image, positions, delta)
    return Prompt(list(tokens), spans)


def image_tokens(config: Any, inputs: dict[str, Any]) -> list[int]:
    """The ids of tokens that stand for an image's features: some processors name them."""
    names = ("image_token_id", "image_token_index")
    known = vars(config) if names[1] not in inputs else inputs
    return [int(known[name]) for name in names if known.get(name) is not None]


def _as_numpy(value: Any) -> Any:
    if isinstance(value, mx.array) and value.dtype == mx.bfloat16:
        value = value.astype(mx.float32)
    return np.array(ops.as_numpy(value)) if isinstance(value, mx.array) else value
