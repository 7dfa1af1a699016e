"""Reads a head from the files in which it is published."""

from os import PathLike
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.heads.eagle3_files import open_eagle3, read_config
from mlx_paged.heads.head import Head
from mlx_paged.heads.mtp_files import NAME, open_mtp
from mlx_paged.heads.mtp_layouts import LAYOUTS


def open_head(path: str | PathLike[str], target: nn.Module) -> Head:
    """The head at a path, bound to the model `target`.

    Args:
        path: a folder with the ``config.json`` and safetensors of an EAGLE-3 head, or what
            :func:`~mlx_paged.heads.mtp_files.open_mtp` takes.
        target: the model that it guesses for.

    Raises:
        ValueError: it cannot be read, is of no known kind or is not one of this model.
    """
    folder = Path(path)
    if not folder.exists():
        raise ValueError(f"draft head {path}: expected a folder or a file with a head")
    try:
        if folder.is_file() or _is_mtp(folder):
            head: Head = open_mtp(folder)
        else:
            head = open_eagle3(folder, len(getattr(target, "layers", [])))
    except ValueError as error:
        reason = str(error).removeprefix("draft head: ").removeprefix(f"{folder}: ")
        raise ValueError(f"draft head {path}: {reason}") from None
    head.bind(target)
    mx.eval(head.parameters())
    return head


def _is_mtp(folder: Path) -> bool:
    """Whether a folder has an extracted MTP head, or a checkpoint that may have one."""
    if (folder / NAME).is_file():
        return True
    return str(read_config(folder / "config.json").get("model_type")) in LAYOUTS
