"""Checks of models' names and folders, which read no file. Knows no mlx."""

from pathlib import Path

FOLDER = "expected a folder with config.json and *.safetensors"
HUB = "; models of the hub have names such as mlx-community/Qwen3-0.6B-4bit"
TOKENIZER_FILES = ("tokenizer.*", "tokenization*", "*vocab*", "*.model", "*.tiktoken", "tekken*")
"""Files of which a folder with a tokenizer has at least one. Others only configure a tokenizer."""


def check_model(name: str, adapter_path: str | None = None) -> None:
    """Raise ValueError unless `name` may be a model on the hub or is a folder that has files of a
    model, and the adapter is a folder. Files are not read."""
    path = Path(name)
    if adapter_path is not None and not Path(adapter_path).is_dir():
        raise ValueError(f"adapter {adapter_path}: no such directory")
    if not path.exists() and not _may_be_hub_id(name):
        raise ValueError(f"model {name}: no such directory{f': {FOLDER}' if '/' in name else HUB}")
    _require_no_gguf(path)
    if path.is_file():
        raise ValueError(f"model {name}: it is a file: {FOLDER}")
    if path.is_dir() and not (path / "config.json").exists():
        within = sorted(file.parent.name for file in path.glob("*/config.json"))
        names = f", such as {', '.join(within[:3])} in it" if within else ""
        raise ValueError(f"model {name}: it has no config.json: {FOLDER}{names}")
    _require_tokenizer(path)


def has_tokenizer(directory: Path) -> bool:
    """Whether the folder of a model has the vocabulary of a tokenizer."""
    return any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES)


def _require_no_gguf(path: Path) -> None:
    """Raise ValueError for a GGUF file, or for a folder that has one and no safetensors."""
    is_gguf = path.suffix.lower() == ".gguf"
    if (
        path.is_dir()
        and not any(path.glob("*.safetensors"))
        and not any(path.glob("*/config.json"))
    ):
        is_gguf = any(path.glob("*.gguf"))
    if is_gguf:
        raise ValueError(f"model {path}: GGUF is not read: {FOLDER}")


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
