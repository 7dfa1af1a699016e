"""Models by the names that the bench gives them."""

import mlx.nn as nn

from bench.models import SIZES, llama_model
from mlx_paged.model_loader import load_model as load


def load_model(name: str) -> tuple[nn.Module, int]:
    """A model and the size of its vocabulary.

    Args:
        name: "demo", a key of :data:`bench.models.SIZES`, or a directory or hub id.

    Raises:
        ValueError: it cannot be loaded.
    """
    if name in SIZES:
        return llama_model(name), int(SIZES[name]["vocab_size"])
    model, tokenizer = load(None if name == "demo" else name)
    args = getattr(model, "args", None)
    return model, int(getattr(args, "vocab_size", None) or tokenizer.vocab_size)
