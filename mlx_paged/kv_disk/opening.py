"""Opens the tier of an engine: a hash names all that its K/V depends on."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_paged.kv.block_manager import KVBlockManager
from mlx_paged.kv_disk.packs import PackFiles
from mlx_paged.kv_disk.store import DiskStore
from mlx_paged.kv_disk.tier import KVDiskTier

INDEX_SECONDS = 5.0
"""So long an engine waits for the index of its store. What is found later is used later."""


def open_tier(
    directory: str | os.PathLike[str],
    max_bytes: int,
    sources: Sequence[str | os.PathLike[str]],
    model: nn.Module,
    tokenizer: Any,
    manager: KVBlockManager,
    seconds_to_compute: Callable[[int, int], float],
) -> KVDiskTier:
    """A tier for the sequences of `manager`; see :class:`KVDiskTier`.

    Args:
        sources: directories that the model was loaded from, if its weights are still the same.

    Raises:
        ValueError: another engine uses the directory, or it cannot be used.
    """
    files = PackFiles(directory, max_bytes)
    weights = weights_hash(model, sources, files.directory / "weights.json")
    store = DiskStore(files, identity(model, tokenizer, manager, weights))
    store.flush(INDEX_SECONDS)
    sizes = [
        group.width * sum(handles[i][:, 0].nbytes for handles, i in manager.pool.arrays_of(index))
        for index, group in enumerate(manager.plan.groups)
    ]
    return KVDiskTier(store, manager.allocator, seconds_to_compute, sizes)


def identity(model: nn.Module, tokenizer: Any, manager: KVBlockManager, weights: bytes) -> bytes:
    """32 bytes: a hash of all that a block's K/V depends on but its tokens.

    Args:
        weights: from :func:`weights_hash`.
    """
    pool = manager.pool
    arrays = [(h.shape[:1], h.shape[2:], str(h.dtype)) for h in pool.handles()]
    known = {
        "weights": weights.hex(),
        "model": [type(model).__module__, type(model).__qualname__, _options(model)],
        "tokenizer": _vocabulary(tokenizer),
        "layout": [pool.block_size, arrays, str(manager.plan)],
        "computed by": [*map(version, ("mlx", "mlx-lm")), str(mx.default_device())],
    }
    return sha256(json.dumps(known, sort_keys=True, default=repr).encode()).digest()


def weights_hash(model: nn.Module, sources: Sequence[str | os.PathLike[str]], cache: Path) -> bytes:
    """A hash of all weights, 32 bytes, adapters included.

    Args:
        cache: file with hashes by the names, sizes, times and inodes of all files there, so that
            the next process need not compute them. Without sources it is not used.
    """
    name, known = _files_hash(sources), dict[str, str]()
    with suppress(OSError, ValueError):
        known = json.loads(cache.read_text())
    known = known if isinstance(known, dict) else {}
    found = known.get(name) if name else None
    if isinstance(found, str) and len(found) == 64:
        return bytes.fromhex(found)
    result = _arrays_hash(tree_flatten(model.parameters()))
    if name:
        with suppress(OSError):
            new = cache.with_suffix(".new")
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(file, "w") as stream:
                json.dump(known | {name: result.hex()}, stream)
            new.replace(cache)
    return result


def _files_hash(sources: Sequence[str | os.PathLike[str]]) -> str:
    """What the files are, without reading them; empty if a source is no directory."""
    if not sources or not all(Path(source).is_dir() for source in sources):
        return ""
    found = []
    for path in sorted(p for source in sources for p in Path(source).resolve().rglob("*")):
        s = path.stat()
        found.append(f"{path} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino}")
    return sha256("\n".join(found).encode(errors="surrogateescape")).hexdigest()


def _arrays_hash(arrays: Iterable[tuple[str, mx.array]]) -> bytes:
    """Hashes of the arrays by several threads, and a hash of these."""

    def digest(array: mx.array) -> Future[bytes]:
        content: Any = np.asarray(array.reshape(-1).view(mx.uint8))
        return threads.submit(lambda: sha256(content).digest())

    total = sha256()
    with ThreadPoolExecutor() as threads:
        parts = [(f"{name} {a.dtype} {a.shape}", digest(a)) for name, a in sorted(arrays)]
        for name, part in parts:
            total.update(name.encode() + part.result())
    return total.digest()


def _options(model: nn.Module) -> Any:
    """The options of a model, as far as it keeps them."""
    options = getattr(model, "args", None)
    return getattr(options, "__dict__", None) or repr(options)


def _vocabulary(tokenizer: Any) -> str:
    """A hash of a tokenizer's tokens; of its type if it has none."""
    tokens: Any = getattr(tokenizer, "get_vocab", dict)()
    text = repr([type(tokenizer).__qualname__, *sorted(map(repr, tokens.items()))])
    return sha256(text.encode(errors="surrogatepass")).hexdigest()
