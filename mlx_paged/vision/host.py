"""A model of mlx-vlm in the form of a model of mlx-lm."""

import json
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import cache as stock
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from mlx_paged.arguments import missing
from mlx_paged.holdings import CountedBy, Holding
from mlx_paged.runner.batch import Batch
from mlx_paged.runner.hosted_model import HostedModel
from mlx_paged.runner.model_probe import UnsupportedModelError, leaves
from mlx_paged.runner.skip_unsampled import attached_to, lock_of, override
from mlx_paged.vision.image_spans import ImageSpans, Picture, size_of
from mlx_paged.vision.kept_features import KeptFeatures
from mlx_paged.vision.prompts import ImageProcessor
from mlx_paged.vision.tower_work import TowerWork

KEPT_BYTES = 256 << 20
"""Bytes of pictures' features that are kept for later requests."""


SEEING = {
    "aya_vision", "dots_ocr", "gemma3", "gemma4", "glm4v", "glm4v_moe", "glm_ocr", "idefics3",
    "internvl", "internvl_chat", "kimi_vl", "lfm2_vl", "llava", "mage_vl", "mistral3",
    "paddleocr_vl", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
    "qwen3_5_moe", "smolvlm",
}  # fmt: skip
"""Architectures of mlx-vlm whose answers are the same in a batch; docs/vision.md."""

REASONS = {
    "its images have more embeddings than tokens": (
        "fastvlm", "granite_vision", "llava_bunny", "llava_next", "multi_modality", "phi4_siglip",
    ),
    "its images are read by cross-attention, which has no blocks": (
        "florence2", "mllama", "nemotron_parse",
    ),
    "tokens of its prompts see later ones": ("moondream2", "moondream3", "paligemma"),
    "the tokens of its images have ids below 0": ("phi3_v",),
    "it reads further inputs of each layer that its images change": ("gemma3n",),
}  # fmt: skip
"""Why others are refused."""


SCALED_BY_FIRST_ROW = ("ministral3", "mistral4")
"""Text models that scale all rows' queries by the position of the first row."""


def load_seeing(path: str, **tokenizer_config: Any) -> tuple[nn.Module, TokenizerWrapper, Any]:
    """A model of mlx-vlm, its tokenizer as mlx-lm wraps it, and its configuration.

    Raises:
        ValueError: mlx-vlm is not installed, or the model's answers could be wrong.
        Exception: whatever mlx-vlm raises.
    """
    try:
        from mlx_vlm import load
        from mlx_vlm.utils import get_model_path
    except ImportError as error:
        raise ValueError(missing(f"mlx-vlm ({error})", "vision")) from error
    directory = Path(get_model_path(path))
    model, processor = load(str(directory))
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    own = getattr(processor, "tokenizer", processor)
    template = getattr(processor, "chat_template", None) or own.chat_template
    if template:
        tokenizer_config = {"chat_template": template} | tokenizer_config
    ends = getattr(model.config, "eos_token_id", None) or config.get("eos_token_id")
    tokenizer: TokenizerWrapper = load_tokenizer(directory, tokenizer_config, eos_token_ids=ends)
    host = hosted(model, processor)
    assert host is not None
    return host[0], tokenizer, config


def hosted(model: nn.Module, processor: Any) -> "tuple[SeeingModel, Any] | None":
    """A model of mlx-vlm in the form of mlx-lm's, and its tokenizer; None if it is no model of
    mlx-vlm.

    Raises:
        UnsupportedModelError: its answers could be wrong.
    """
    if isinstance(model, SeeingModel):
        return model, processor
    package, *names = type(model).__module__.split(".")
    if package != "mlx_vlm":
        return None
    kind = names[1] if len(names) > 1 else ""
    if not (hasattr(model, "get_input_embeddings") and hasattr(model, "language_model")):
        raise UnsupportedModelError(
            f"{type(model).__name__} of mlx-vlm is a part of a model: expected the first value of"
            " mlx_vlm.load(path)"
        )
    reason = next((why for why, kinds in REASONS.items() if kind in kinds), None)
    options = getattr(model.language_model, "config", None)
    if getattr(options, "use_bidirectional_attention", None) == "vision":
        reason = "the tokens of an image see later ones"
    if kind not in SEEING or reason is not None:
        known = f"expected one of {', '.join(sorted(SEEING))}"
        raise UnsupportedModelError(f"model {kind} of mlx-vlm is refused: {reason or known}")
    seeing = attached_to(model, "seeing", SeeingModel)
    if hasattr(processor, "tokenizer"):
        seeing.processor = ImageProcessor(model, processor)
        processor = processor.tokenizer
    return seeing, processor


class Features(NamedTuple):
    """What the model has of a picture: a row for each of its tokens.

    Attributes:
        embeddings: ``[n, D]``, input of the first layer.
        deep: ``[n, D]`` for each of the first layers, added to its output.
    """

    embeddings: mx.array
    deep: tuple[mx.array, ...]


class PictureFeatures:
    """Features of the pictures that are worth most.

    Attributes:
        num_encoded: calls of the vision tower.
        seconds: that these calls took.
    """

    def __init__(self, vlm: Any) -> None:
        self._vlm = vlm
        self._work = TowerWork.of(vlm)
        self._kept = KeptFeatures(KEPT_BYTES)
        self._lock = Lock()  # engines on one model share these
        self.num_encoded = 0
        self.seconds = 0.0

    def of(self, picture: Picture) -> Features:
        """The features of a picture, computed now if they are not known."""
        with self._lock:
            kept: Features | None = self._kept.get(picture.digest)
            if kept is not None:
                return kept
            started = time.perf_counter()
            found = self._computed(picture)
            self.seconds += time.perf_counter() - started
            self.num_encoded += 1
            operations = self._work.of_inputs(picture.inputs)
            self._kept.add(picture.digest, found, size_of(found), operations)
            return found

    def forget(self) -> bool:
        """Forget all; returns whether there were any."""
        with self._lock:
            had_any = bool(self._kept)
            self._kept.clear()
            return had_any

    @property
    def nbytes(self) -> int:
        """Of the features that are kept."""
        return self._kept.nbytes

    def _computed(self, picture: Picture) -> Features:
        tokens, rows = mx.array(picture.tokens)[None], mx.array(picture.rows.astype(np.int32))
        inputs = tree_map(_as_mlx, picture.inputs)
        seen = self._vlm.get_input_embeddings(tokens, mask=mx.ones_like(tokens), **inputs)
        deep = seen.deepstack_visual_embeds
        found = Features(seen.inputs_embeds[0][rows], () if deep is None else tuple(deep))
        mx.eval(found)
        return found


class _ImageRows(NamedTuple):
    """The rows of a batch that compute a sequence with images.

    Attributes:
        spans: the images of the sequence's prompt.
        start: the position of the first row's token in the sequence.
        stop: the position after the last row's.
        row: the index of the first row.
    """

    spans: ImageSpans
    start: int
    stop: int
    row: int


def _image_rows(batch: Batch) -> list[_ImageRows]:
    """The rows of each sequence whose prompt has images."""
    found = []
    for span, row in zip(batch.spans, batch.first_rows, strict=True):
        prompt = span.request.prompt
        if prompt is not None and isinstance(prompt.image_spans, ImageSpans):
            found.append(_ImageRows(prompt.image_spans, span.start, span.stop, int(row)))
    return found


class SeeingModel(HostedModel):
    """A model of mlx-vlm that is called as one of mlx-lm.

    Attributes:
        vlm: the model of mlx-vlm.
        has_positions: a token's position has three numbers (time, height, width), which images
            change.
        pictures: the features of images.
        one_at_a_time: rows of a batch cannot have positions of their own.
        processor: makes prompts with images; None: mlx-vlm's processor is not known.
    """

    def __init__(self, vlm: Any) -> None:
        super().__init__()
        self.vlm = vlm
        language = vlm.language_model
        self.has_positions = hasattr(language, "get_rope_index")
        self.one_at_a_time = getattr(language, "model_type", "") in SCALED_BY_FIRST_ROW
        self.pictures = PictureFeatures(vlm)
        self.processor: ImageProcessor | None = None
        for _, module in language.named_modules():
            if hasattr(module, "_deepstack_process"):
                override(module, "_deepstack_process", _add_deep)

    @property
    def args(self) -> Any:
        """Options of the model that reads text."""
        language = self.vlm.language_model
        return getattr(language, "args", None) or language.config

    @property
    def model_type(self) -> str:
        return str(self.vlm.config.model_type)

    @property
    def identity(self) -> list[str]:
        """What K/V depends on beside weights and `args`."""
        return [version("mlx-vlm"), repr(self.vlm.config)]

    @property
    def extra_seconds(self) -> float:
        """How long the vision tower took so far."""
        return self.pictures.seconds

    def forget_kept(self) -> bool:
        return self.pictures.forget()

    def holdings(self) -> list[Holding]:
        return [Holding("image_features", self.pictures.nbytes, KEPT_BYTES, CountedBy.MLX)]

    @property
    def text_model(self) -> nn.Module:
        language: nn.Module = self.vlm.language_model
        return language

    @property
    def layers(self) -> Any:
        return self.vlm.language_model.layers

    def make_cache(self) -> list[Any]:
        """Caches of mlx-lm instead of those of mlx-vlm."""
        from mlx_vlm.models.cache import make_prompt_cache

        return [_of_mlx_lm(cache) for cache in make_prompt_cache(self.vlm.language_model)]

    def __call__(self, inputs: mx.array, cache: Sequence[Any], **arguments: Any) -> mx.array:
        """Logits of tokens; `arguments` are those of :meth:`arguments`."""
        if self.has_positions and "position_ids" not in arguments:
            arguments["position_ids"] = _counted(inputs, cache)
        logits: mx.array = self.vlm.language_model(inputs, cache=cache, **arguments).logits
        return logits

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """What a batch with pictures needs beside its tokens; nothing if no row needs anything."""
        rows = _image_rows(batch)
        if not rows:
            return {}
        with lock_of(self):
            found = self._embeddings(batch, rows)
        if self.has_positions:
            found["position_ids"] = mx.array(_shaped(_positions(batch, rows), batch, 1))
        return found

    def _embeddings(self, batch: Batch, image_rows: Sequence[_ImageRows]) -> dict[str, Any]:
        """The model's arguments by which the tokens of pictures have the pictures' features."""
        index = np.arange(len(batch.tokens))
        parts: list[Features] = []
        num_seen = 0
        for spans, start, stop, row in image_rows:
            numbers = spans.features[start:stop]
            at = np.flatnonzero(numbers >= 0)
            if len(at):
                features, first = self._features(spans, numbers[at[0]], numbers[at[-1]])
                index[row + at] = len(index) + num_seen + numbers[at] - first
                parts += features
                num_seen += sum(len(each.embeddings) for each in features)
        if not parts:
            return {}
        text = self.vlm.get_input_embeddings(batch.tokens[None])
        own = text.inputs_embeds[0]
        rows = mx.concatenate([own, *(each.embeddings.astype(own.dtype) for each in parts)])
        found = {"inputs_embeds": _shaped(rows[mx.array(index)], batch)}
        if text.per_layer_inputs is not None:
            found["per_layer_inputs"] = _shaped(text.per_layer_inputs[0], batch)
        if parts[0].deep:
            after = mx.array(np.maximum(index - len(index) + 1, 0))
            none = mx.zeros_like(parts[0].deep[0][:1])
            layers = zip(*(each.deep for each in parts), strict=True)
            deep = [_shaped(mx.concatenate([none, *layer])[after], batch) for layer in layers]
            found["deepstack_visual_embeds"] = deep
            found["visual_pos_masks"] = mx.ones(batch.inputs.shape, mx.bool_)
        return found

    def _features(self, spans: ImageSpans, first: int, last: int) -> tuple[list[Features], int]:
        """The features of the pictures that have features number `first` to `last`, and the number
        of the first of these pictures' features."""
        low, high = np.searchsorted(spans.first, [first, last], side="right") - 1
        pictures = spans.pictures[low : high + 1]
        return [self.pictures.of(picture) for picture in pictures], int(spans.first[low])


def image_processor(model: nn.Module) -> ImageProcessor | None:
    """What makes prompts of text and images for a model; None if the model sees no images."""
    return model.processor if isinstance(model, SeeingModel) else None


def _add_deep(original: Any, hidden: mx.array, is_seen: mx.array, deep: mx.array) -> mx.array:
    """Add a layer's features: those of this module are zero at tokens of text."""
    if deep.shape != hidden.shape:
        return original(hidden, is_seen, deep)  # type: ignore[no-any-return]
    return hidden + deep.astype(hidden.dtype)


def _positions(batch: Batch, image_rows: Sequence[_ImageRows]) -> Any:
    """``[3, T + padding]``: where each token of a batch is in time, height and width."""
    found = np.broadcast_to(np.array(batch.positions), (3, len(batch.tokens))).copy()
    for spans, start, stop, row in image_rows:
        if spans.positions is not None:
            known = spans.positions[:, start:stop]
            end = row + known.shape[1]
            found[:, row:end] = known
            found[:, end : row + stop - start] += spans.delta
    return found


def _shaped(rows: Any, batch: Batch, axis: int = 0) -> Any:
    """Rows of tokens in the form of the model's input."""
    before, after = rows.shape[:axis], rows.shape[axis + 1 :]
    return rows.reshape(*before, *batch.inputs.shape, *after)


def _counted(inputs: mx.array, cache: Sequence[Any]) -> mx.array:
    """Positions ``[3, B, L]`` of tokens that follow those of a cache, without images."""
    offset = next(leaf.offset for leaf in leaves(cache) if hasattr(leaf, "offset"))
    first = offset[:, None] if isinstance(offset, mx.array) else offset
    return mx.broadcast_to(first + mx.arange(inputs.shape[1]), (3, *inputs.shape))


def _of_mlx_lm(cache: Any) -> Any:
    """mlx-lm's cache of the same kind."""
    kind = type(cache).__name__
    if kind == "CacheList":
        return stock.CacheList(*map(_of_mlx_lm, cache.caches))
    if kind == "ArraysCache":  # whose layers call further methods of mlx-vlm's class
        both = type(kind, (type(cache), stock.ArraysCache), {"stock_class": stock.ArraysCache})
        return both(len(cache.cache))
    if kind == "RotatingKVCache":
        return stock.RotatingKVCache(cache.max_size, cache.keep)
    if kind in ("KVCache", "SimpleKVCache"):
        return stock.KVCache()
    if kind == "ChunkedKVCache":
        return stock.ChunkedKVCache(cache.chunk_size)
    raise UnsupportedModelError(f"cache class {kind} of mlx-vlm cannot be paged")


def _as_mlx(value: Any) -> Any:
    return mx.array(value) if isinstance(value, np.ndarray) else value
