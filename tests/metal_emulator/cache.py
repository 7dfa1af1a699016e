"""Compiled code on disk, by a hash of all that it was made from."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 512 * 1024 * 1024


def directory() -> Path:
    """METAL_EMULATOR_CACHE, or a directory of this user among the temporary files."""
    default = Path(tempfile.gettempdir()) / f"metal_emulator_{os.getuid()}"
    path = Path(os.environ.get("METAL_EMULATOR_CACHE", default))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def cached(suffix: str, ingredients: list[str], make: Callable[[Path], None]) -> Path:
    """The file that `make` writes to the path it is given, made once per `ingredients`."""
    key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:24]
    path = directory() / f"{key}{suffix}"
    with suppress(FileNotFoundError):  # another process may delete it
        os.utime(path)
        return path
    with tempfile.TemporaryDirectory(dir=directory()) as scratch:
        new = Path(scratch) / path.name
        make(new)
        os.replace(new, path)  # at once, as another process may make the same
    _evict()
    return path


def provide(path: Path, text: str) -> None:
    """Make `path` a file with this text; other processes never see half of it."""
    if path.exists() and path.read_text() == text:
        return
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _evict() -> None:
    """Delete the files that were unused longest while there is too much."""
    files = []
    for path in directory().iterdir():
        with suppress(FileNotFoundError):  # another process may delete the same
            status = path.stat()
            if path.is_file():
                files.append((status.st_mtime, status.st_size, path))
    excess = sum(size for _, size, _ in files) - MAX_BYTES
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size
