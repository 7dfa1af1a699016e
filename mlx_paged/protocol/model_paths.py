"""Which model a request's `model` names: the one that is loaded, or another in the hub's cache."""

from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

DEFAULT = "default_model"
"""A name of the default model, as in mlx-lm."""


def is_path_of(name: str, default: str) -> bool:
    """Whether `name` is :data:`DEFAULT`, or names the same directory as `default`."""
    directory = None if name in (DEFAULT, default) else directory_of(name)
    return name in (DEFAULT, default) or (
        directory is not None and directory == directory_of(default)
    )


def is_last_part_of(name: str, default: str) -> bool:
    """Whether the path `default`, or its real path, ends with the part `name`."""
    own = directory_of(default)
    return name in (Path(default).name, own.name if own else None)


def directory_of(name: str) -> Path | None:
    """The real path of a model's directory, which is a path or an id in the hub's cache; None if
    there is none."""
    with suppress(Exception):  # the name can be anything, and so can the errors
        if (Path(name) / "config.json").is_file():
            return Path(name).resolve()
    return cached_snapshot(name)


def cached_snapshot(name: str) -> Path | None:
    """The real path of a repository's newest snapshot in the hub's cache; None if there is none."""
    with suppress(Exception):
        found = try_to_load_from_cache(name, "config.json")
        if isinstance(found, str):
            return Path(found).parent.resolve()
    return None
