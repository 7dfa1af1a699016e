"""Opens the tier of an engine: a hash names all that its K/V depends on."""

import gc
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_paged import ops
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_bytes import Staging
from mlx_paged.kv.layer_groups import PoolPlan
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv_disk.packs import PackFiles
from mlx_paged.kv_disk.store import DiskStore
from mlx_paged.kv_disk.tier import STEP_BYTES, KVDiskTier

INDEX_SECONDS = 5.0
"""Seconds that an engine waits for the index of its store. Records found later are used later."""

Paths = Sequence[str | os.PathLike[str]]


class Pooled(Protocol):
    """A pool, with all that depends on how the layers share it."""

    @property
    def allocator(self) -> BlockAllocator: ...
    @property
    def pool(self) -> KVPool: ...
    @property
    def plan(self) -> PoolPlan: ...


def open_tier(
    directory: str | os.PathLike[str],
    max_bytes: int,
    sources: Paths,
    model: nn.Module,
    tokenizer: Any,
    pooled: Pooled,
    seconds_to_compute: Callable[[int, int], float],
) -> KVDiskTier:
    """A tier for the sequences of a pool; see :class:`KVDiskTier`.

    Args:
        sources: directories that the model was loaded from, if its weights are still the same.

    Raises:
        ValueError: another engine uses the directory, or it cannot be used.
    """
    weights = weights_hash(model, sources, Path(directory, "weights.json"))
    known, rows = identity(model, tokenizer, pooled, weights), Staging(STEP_BYTES).rows
    gc.collect()  # an engine that was dropped holds its directory until it is collected
    store = DiskStore(PackFiles(directory, max_bytes), known, rows)
    store.flush(INDEX_SECONDS)
    sizes = [
        group.width * sum(handles[i][:, 0].nbytes for handles, i in pooled.pool.arrays_of(index))
        for index, group in enumerate(pooled.plan.groups)
    ]
    return KVDiskTier(store, pooled.allocator, seconds_to_compute, sizes)


def identity(model: nn.Module, tokenizer: Any, pooled: Pooled, weights: str) -> bytes:
    """A hash, 32 bytes, of all that a block's K/V depends on except its tokens.

    Args:
        weights: from :func:`weights_hash`.
    """
    options = getattr(model, "args", None)
    known = {
        "weights": weights,
        "model": [
            type(model).__module__,
            type(model).__qualname__,
            *getattr(model, "identity", ()),
        ],
        "options": getattr(options, "__dict__", None) or repr(options),
        "tokenizer": _vocabulary(tokenizer),
        "layout": [pooled.pool.block_size, str(pooled.plan)],  # shapes and kv_bits among it
        **({"states": layout} if (layout := pooled.allocator.states.layout) else {}),
        "computed by": [*map(version, ("mlx", "mlx-lm", "mlx-paged")), str(mx.default_device())],
    }
    return sha256(json.dumps(known, sort_keys=True, default=repr).encode()).digest()


def weights_hash(model: nn.Module, sources: Paths, cache: Path) -> str:
    """A hash of all weights, 64 digits, adapters included.

    Args:
        cache: file with hashes by the names, sizes, times and inodes of all files there, so that
            the next process need not compute them. Without sources it is not used.
    """
    name, known = _files_hash(sources), dict[str, str]()
    with suppress(OSError, ValueError):
        known = dict(json.loads(cache.read_text()))
    found = known.get(name) if name else None
    if isinstance(found, str) and len(found) == 64:
        return found
    result = _arrays_hash(tree_flatten(model.parameters()))
    if name:
        with suppress(OSError):
            cache.parent.mkdir(0o700, parents=True, exist_ok=True)
            new = cache.with_suffix(".new")
            new.touch(0o600)
            new.write_text(json.dumps(known | {name: result}))
            new.replace(cache)
    return result


def _files_hash(sources: Paths) -> str:
    """What the files are, without reading them; empty if a source is no directory."""
    if not sources or not all(Path(source).is_dir() for source in sources):
        return ""
    found = []
    for path in sorted(p for source in sources for p in Path(source).resolve().rglob("*")):
        if not path.exists():  # a link to nothing
            continue
        s = path.stat()
        found.append(f"{path} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino}")
    return sha256("\n".join(found).encode(errors="surrogateescape")).hexdigest()


def _arrays_hash(named: Sequence[tuple[str, mx.array]]) -> str:
    """A hash of arrays and their names."""
    total = sha256()
    for name, array in sorted(named):
        content: Any = ops.as_numpy(array.reshape(-1).view(mx.uint8))
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(content)
    return total.hexdigest()


def _vocabulary(tokenizer: Any) -> str:
    """A hash of a tokenizer's tokens; of its type if it has none."""
    tokens: Any = getattr(tokenizer, "get_vocab", dict)()
    text = repr([type(tokenizer).__qualname__, *sorted(map(repr, tokens.items()))])
    return sha256(text.encode(errors="surrogatepass")).hexdigest()
