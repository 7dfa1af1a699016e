"""Models of the commands, loaded from the names that flags give."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import hf_repo_to_path, load_config

from mlx_paged.cli import demo_model_path
from mlx_paged.options import DEFAULTS, OPTIONS
from mlx_paged.runner.ranks import rank
from mlx_paged.vision.host import load_seeing

POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
"""Names that configurations have for the number of positions."""
TOKENIZER_FILES = ("tokenizer.*", "tokenization*", "*vocab*", "*.model", "*.tiktoken", "tekken*")
"""Files of which a folder with a tokenizer has at least one. Others only configure a tokenizer."""


def _draft_model(path: str) -> nn.Module:
    try:
        return load_model(path)[0]
    except ValueError as error:
        raise ValueError(f"--draft-model: {error}") from error


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of :class:`Engine` that the flags of a command give, by name. Loads the draft
    model.

    Raises:
        ValueError: flags that contradict each other, or a draft model that cannot be loaded.
    """
    if args.speculate is not None and args.draft_model is not None:
        raise ValueError("--speculate is given beside --draft-model: expected one of them")
    if args.num_draft_tokens != DEFAULTS["num_draft_tokens"] and args.draft_model is None:
        raise ValueError("--num-draft-tokens is given: expected --draft-model beside it")
    if args.kv_disk_gb is not None and args.kv_disk is None:
        raise ValueError("--kv-disk-gb is given: expected --kv-disk beside it")
    options = {name: getattr(args, name) for name in OPTIONS if hasattr(args, name)}
    if args.kv_disk_gb is None:
        del options["kv_disk_gb"]
    if args.draft_model is not None:
        options["draft_model"] = _draft_model(args.draft_model)
    model_files = [args.model or demo_model_path(), args.adapter_path]
    options["model_files"] = [path for path in model_files if path is not None]
    return options


def of_another_model(args: argparse.Namespace) -> argparse.Namespace:
    """The same arguments of a command, without what belongs to the model of ``--model`` alone: its
    adapter, its draft model, its directory of K/V."""
    own = ("adapter_path", "draft_model", "kv_disk", "kv_disk_gb")
    num_draft_tokens = DEFAULTS["num_draft_tokens"]
    others = dict.fromkeys(own) | {"num_draft_tokens": num_draft_tokens}
    return argparse.Namespace(**vars(args) | others)


def load_model(
    name: str | None = None,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    sees: bool = False,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer as ``mlx_lm.load`` does; None loads the demo model. If it
    `sees`, mlx-vlm loads it. Raises ValueError if the model or the adapter does not exist or cannot
    be loaded."""
    path = str(demo_model_path()) if name is None else name
    return load_with_config(path, adapter_path, trust_remote_code, sees)[:2]


def load_with_config(
    path: str,
    adapter_path: str | None,
    trust_remote_code: bool,
    sees: bool = False,
    **tokenizer_config: str,
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """A model, its tokenizer and its configuration. Under mlx.launch the weights are read when they
    are used. Raises ValueError as :func:`load_model`."""
    if adapter_path is not None and not Path(adapter_path).is_dir():
        raise ValueError(f"adapter {adapter_path}: no such directory")
    if not Path(path).exists() and not _may_be_hub_id(path):
        raise ValueError(f"model {path}: no such directory")
    _require_no_gguf(Path(path))
    _require_tokenizer(Path(path))
    if sees and adapter_path is not None:
        raise ValueError("--adapter-path is given beside --vision: expected one of them")
    if sees and trust_remote_code:
        raise ValueError("--trust-remote-code is given beside --vision: expected one of them")
    try:
        if sees:
            return load_seeing(path, **tokenizer_config)
        loaded: tuple[nn.Module, TokenizerWrapper, dict[str, Any]] = load(
            path,
            adapter_path=adapter_path,
            tokenizer_config={"trust_remote_code": trust_remote_code} | tokenizer_config,
            return_config=True,
            trust_remote_code=trust_remote_code,
            lazy=rank() is not None,
        )
    except Exception as error:
        kind = "cannot be loaded" if Path(path).exists() else "not here and not from the hub"
        detail = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"model {path}: {kind} ({type(error).__name__}: {detail})") from error
    return loaded


def context_length(name: str | None) -> int | None:
    """Tokens of prompt and completion that a loaded model has positions for; None: no limit."""
    path = Path(demo_model_path() if name is None else name)
    return positions(load_config(path if path.exists() else Path(hf_repo_to_path(str(name)))))


def positions(config: Mapping[str, Any]) -> int | None:
    """How many positions the rotary embedding or the table of a model has; None: no limit."""
    config = config.get("text_config") or config
    positions: int | None = next((config[name] for name in POSITIONS if config.get(name)), None)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if positions is None or kind not in ("linear", "dynamic", "yarn"):
        return positions
    trained = scaling.get("original_max_position_embeddings", positions)
    return max(positions, int(scaling.get("factor", 1) * trained))


def has_tokenizer(directory: Path) -> bool:
    """Whether the folder of a model has the vocabulary of a tokenizer."""
    return any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES)


def _require_no_gguf(path: Path) -> None:
    """Raise ValueError for a GGUF file, or for a folder that has one and no safetensors."""
    is_gguf = path.suffix.lower() == ".gguf"
    if path.is_dir() and not any(path.glob("*.safetensors")):
        is_gguf = any(path.glob("*.gguf"))
    if is_gguf:
        raise ValueError(
            f"model {path}: GGUF is not read: expected a folder with config.json and *.safetensors"
        )


def _require_tokenizer(path: Path) -> None:
    """Raise ValueError for a folder that has weights, but no file of a tokenizer."""
    if path.is_dir() and any(path.glob("*.safetensors")) and not has_tokenizer(path):
        raise ValueError(
            f"model {path}: it has no tokenizer: expected tokenizer.json or tokenizer.model in the"
            " folder"
        )


def _may_be_hub_id(name: str) -> bool:
    owner, _, repo = name.partition("/")
    return bool(owner and repo) and "/" not in repo and not name.startswith((".", "~"))
