"""Loads a model that sees."""

import json
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from mlx_paged.vision.host import SeeingModel, hosted


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
        raise ValueError(f"mlx-vlm is absent ({error}): pip install 'mlx-paged[vision]'") from error
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
    seeing: SeeingModel = host[0]
    return seeing, tokenizer, config
