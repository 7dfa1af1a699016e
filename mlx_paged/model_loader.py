"""Models by directory, hub id, or the built-in demo."""

from importlib.resources import files
from pathlib import Path

import mlx.nn as nn
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper


def demo_model_path() -> Path:
    """Directory of the small Python-writing model that ships with the package."""
    return Path(str(files("mlx_paged") / "demo_model"))


def load_model(
    name: str | None = None, adapter_path: str | None = None, trust_remote_code: bool = False
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer as ``mlx_lm.load`` does; None loads the demo model.

    Raises:
        ValueError: there is no such directory and the hub does not give it either, or what is there
            cannot be loaded.
    """
    path = str(demo_model_path()) if name is None else name
    if adapter_path is not None and not Path(adapter_path).is_dir():
        raise ValueError(f"adapter {adapter_path}: no such directory")
    if not Path(path).exists() and not _may_be_hub_id(path):
        raise ValueError(f"model {path}: no such directory")
    try:
        model, tokenizer, *_ = load(
            path,
            adapter_path=adapter_path,
            tokenizer_config={"trust_remote_code": trust_remote_code},
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:
        kind = "cannot be loaded" if Path(path).exists() else "not here and not from the hub"
        detail = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"model {path}: {kind} ({type(error).__name__}: {detail})") from error
    return model, tokenizer


def _may_be_hub_id(name: str) -> bool:
    owner, _, repo = name.partition("/")
    return bool(owner and repo) and "/" not in repo and not name.startswith((".", "~"))
