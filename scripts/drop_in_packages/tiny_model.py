"""The demo model as a chat model: a folder, and a Hugging Face cache that has it by other names."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from mlx_paged.cli import demo_model_path

CHAT_TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}"
)
CONFIG = {"bos_token_id": 1791, "pad_token_id": 1791}
TOKENIZER = {"chat_template": CHAT_TEMPLATE, "pad_token": "<|endoftext|>"}
NO_NETWORK = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def write_model(folder: Path) -> Path:
    """Write the demo model with a chat template."""
    shutil.copytree(demo_model_path(), folder)
    for name, more in (("config.json", CONFIG), ("tokenizer_config.json", TOKENIZER)):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | more, indent=2))
    return folder


def write_hub(home: Path, repositories: Iterable[str]) -> dict[str, str]:
    """Write a Hugging Face cache in which each repository is the demo model. Returns the
    environment variables of a process that uses it."""
    for repository in repositories:
        root = home / "hub" / f"models--{repository.replace('/', '--')}"
        write_model(root / "snapshots" / "demo")
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("demo")
    return {"HF_HOME": str(home), **NO_NETWORK}
