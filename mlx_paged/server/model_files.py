"""Whether a directory has all files of a model that can be loaded. Reads no weights."""

import json
from pathlib import Path
from typing import Any

from mlx_lm.utils import _get_classes

from mlx_paged.model_folders import has_tokenizer
from mlx_paged.tensor_files import header


def problem(directory: Path, trusts: bool, sees: bool) -> str | None:
    """Why the model in a directory cannot be loaded; None if nothing is found.

    Args:
        directory: of the model.
        trusts: whether its own code may run.
        sees: whether mlx-vlm loads it.
    """
    try:
        config = configuration(directory)
        if not sees:
            _check_architecture(config, trusts)
        weights = sorted(directory.glob("*.safetensors" if sees else "model*.safetensors"))
        if not weights:
            return "it has no weights: expected model*.safetensors"
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            named = set(json.loads(index.read_text())["weight_map"].values())
            missing = sorted(named - {file.name for file in weights})
            if missing:
                return f"{missing[0]} is missing, which {index.name} names"
        for file in weights:
            header(file)
        if not has_tokenizer(directory):
            return "it has no tokenizer"
    except Exception as error:  # a file can have anything
        return f"{type(error).__name__}: {error}"[:300]
    return None


def configuration(directory: Path) -> dict[str, Any]:
    """The configuration of the model in a directory. Raises ValueError if it is no object."""
    config = json.loads((directory / "config.json").read_text())
    if not isinstance(config, dict):
        raise ValueError("config.json is no JSON object")
    return config


def weights_size(directory: Path) -> int:
    """Bytes of its weights."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _check_architecture(config: dict[str, Any], trusts: bool) -> None:
    """Raise ValueError if mlx-lm has no module for the model."""
    if "model_file" not in config:
        _get_classes(config)
    elif not trusts:
        raise ValueError(
            "config.json names a model_file, code that runs with --trust-remote-code for models of"
            " --model, --models-dir and --allow-models only"
        )
