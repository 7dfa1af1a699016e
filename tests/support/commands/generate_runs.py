"""The generate command in tests: prompts, and the files it reads and writes."""

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_paged
from mlx_paged.cli import demo_model_path

RULE = "=" * 10
ROOT = Path(mlx_paged.__file__).parents[1]

FUNCTION = "def main(argv=None):"
CLASS = "class Stack:"
BODY = "    with open(path, encoding=encoding) as file:\n        return file.readlines()\n" * 4
LONG = f"import os\n\n\ndef read_lines(path, encoding=None):\n{BODY}\n\nclass Reader(object):\n"
PROMPTS = [
    FUNCTION,
    CLASS,
    LONG,
    "x",
    "def close(self):\n",  # ends by itself within 64 tokens
    LONG + "    def __init__(self, path):\n",
    "# " + "Helper functions for the tests of the parser. " * 3 + "\n",
]


@dataclass
class Result:
    status: int
    out: str
    err: str


def jsonl(path: Path, lines: Iterable[Any]) -> Path:
    """A file of one JSON value a line; text stands for itself."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def model_copy(path: Path, **changes: dict[str, Any]) -> Path:
    """The demo model at `path`, keys changed in its ``config`` or ``tokenizer_config``."""
    shutil.copytree(demo_model_path(), path)
    for name, entries in changes.items():
        file = path / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mlx_paged.generate", "--kv-memory=0.05", *map(str, arguments)]
