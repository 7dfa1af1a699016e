"""A tiny qwen2-vl on disk, with a tokenizer, a processor and a chat template."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.models import seeing_models

SPECIAL = ["<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
ONLY_PARTS = TEMPLATE.replace("m.content is string", "false").replace(
    "else %}{{ part", "elif part.type == 'text' %}{{ part"
)
"""As SmolVLM's: a text that is not a part of a list is lost."""


def make(directory: Path, template: str = TEMPLATE) -> Path:
    """Write the model; its text tokens are bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    ends = {"eos_token": SPECIAL[0], "pad_token": SPECIAL[0]}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **ends)
    wrapped.save_pretrained(directory)
    ids = {name: wrapped.convert_tokens_to_ids(name) for name in SPECIAL}
    whole = {
        "vocab_size": len(wrapped),
        "eos_token_id": ids["<|im_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    kind = seeing_models.KINDS["qwen2_vl"]
    model = seeing_models.build("qwen2_vl", **whole)
    model.save_weights(str(directory / "model.safetensors"))
    vision = seeing_models.VISION | kind.vision
    config = seeing_models.TEXT | kind.text | whole
    config |= {"model_type": "qwen2_vl", "vision_config": vision}
    (directory / "config.json").write_text(json.dumps(config))
    sizes = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    limits = {"min_pixels": 16 * 16, "max_pixels": 64 * 64}
    processor = sizes | limits | {"image_processor_type": "Qwen2VLImageProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def png(seed: int, width: int = 48, height: int = 32) -> bytes:
    """The bytes of a random image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
