"""mlx-lm on paged caches, within a context or until further notice."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from types import ModuleType
from typing import Any

import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.generate import speculative_generate_step as stock_speculative_generate_step
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.models.cache import make_prompt_cache as stock_make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors as stock_make_logits_processors

from mlx_paged.arguments import TESTED_MLX_LM, UntestedVersionError
from mlx_paged.attention.sdpa_hook import attention_hook
from mlx_paged.drop_in.base_cache import PagedCache
from mlx_paged.drop_in.caches import as_paged, check_options, construction, make_prompt_cache
from mlx_paged.drop_in.kv_caches import KVCache
from mlx_paged.drop_in.outside_ids import (
    check_segments,
    generate_step,
    make_logits_processors,
    speculative_generate_step,
)
from mlx_paged.drop_in.prompt_cache_bytes import (
    insert_cache,
    stock_insert_cache,
    stock_trim_to,
    trim_to,
)
from mlx_paged.drop_in.stored_arrays import stored_arrays_hook
from mlx_paged.options import BLOCK_SIZE
from mlx_paged.runner.model_probe import model_type

OVERRIDE = "MLX_PAGED_ALLOW_UNTESTED_MLX_LM"

STATES_OVER_PADDING = {
    *("baichuan_m1", "bailing_moe_linear", "jamba", "mamba"),
    *("nemotron_h", "olmo_hybrid", "recurrent_gemma", "rwkv7"),
}
"""Models whose recurrent states mlx-lm 0.32.2 itself computes over a row's right padding."""

Options = dict[str, Any]


class _Patch:
    """Whether mlx-lm is patched, and the options that callers gave."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.scopes: list[Options] = []  # of the context managers, the innermost last
        self.lasting: Options | None = None  # of patch_mlx_lm
        self.is_applied = False
        self.hook = ExitStack()

    @property
    def options(self) -> Options | None:
        """The options in force; None while mlx-lm is not patched."""
        return self.scopes[-1] if self.scopes else self.lasting

    def update(self) -> None:
        """Patch mlx-lm if there are options in force, or restore it if there are none."""
        PagedCache.loose_options = self.options or {}
        if self.options is not None and not self.is_applied:
            self.is_applied = True
            self.hook.enter_context(attention_hook())
            self.hook.enter_context(stored_arrays_hook())
            _replace(REPLACED)
        elif self.options is None and self.is_applied:
            self.is_applied = False
            self.hook.close()
            _replace({ours: theirs for theirs, ours in REPLACED.items()})


_patch = _Patch()


def _make_prompt_cache(model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
    """Replaces mlx-lm's function. A closure may keep it, so it asks whether mlx-lm is patched."""
    options = _patch.options
    if options is None:
        caches: list[Any] = stock_make_prompt_cache(model, max_kv_size)
        return caches
    return make_prompt_cache(model, max_kv_size, **options)


def _construct(self: Any) -> None:
    """Replaces the constructor of mlx-lm's KVCache, so that calls of the class give the paged one.
    Loading, copying and unpickling call no constructor. Rotating caches and batches that a script
    makes itself stay mlx-lm's own: it knows how these lay out K/V and padding."""
    is_paged = _patch.options is not None and not getattr(construction, "is_stock", False)
    if is_paged and type(self) is KVCache.stock_class:
        self.__class__ = KVCache
        KVCache.__init__(self)
    else:
        stock_construct(self)


def _insert_segments(
    self: BatchGenerator,
    segments: Any,
    max_tokens: Any = None,
    caches: Sequence[Any] | None = None,
    *args: Any,
    **more: Any,
) -> list[int]:
    """Replaces mlx-lm's method, so that caches that mlx-lm made or loaded can join paged ones."""
    options = _patch.options
    check_segments(self.model, segments)
    if options is not None and caches:
        model, size = self.model, self.max_kv_size
        caches = [c if c is None else as_paged(model, c, size, **options) for c in caches]
    uids: list[int] = stock_insert_segments(self, segments, max_tokens, caches, *args, **more)
    return uids


def _prompt(batch: PromptProcessingBatch, tokens: Sequence[list[int]]) -> None:
    """Replaces mlx-lm's method: prompts of several lengths are computed one by one for models whose
    states would take padding in."""
    is_ragged = len({len(row) for row in tokens}) > 1
    if not is_ragged or model_type(batch.model) not in STATES_OVER_PADDING:
        stock_prompt(batch, tokens)
        return
    rows = [batch.split([0]) for _ in tokens]
    try:
        for row, row_tokens in zip(rows, tokens, strict=True):
            stock_prompt(row, [row_tokens])
    finally:
        for row in rows:
            batch.extend(row)


stock_construct = KVCache.stock_class.__init__
stock_insert_segments = BatchGenerator.insert_segments
stock_prompt = PromptProcessingBatch.prompt
REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    stock_make_prompt_cache: _make_prompt_cache,
    stock_insert_segments: _insert_segments,
    stock_prompt: _prompt,
    stock_construct: _construct,
    stock_insert_cache: insert_cache,
    stock_trim_to: trim_to,
    stock_generate_step: generate_step,
    stock_speculative_generate_step: speculative_generate_step,
    stock_make_logits_processors: make_logits_processors,
}
"""Functions and methods of mlx-lm, and what replaces them."""


def _replace(replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Rebind every name of these functions in all loaded modules but this package's own."""
    by_id, refused = {id(old): new for old, new in replaced.items()}, []
    for holder in (BatchGenerator, PromptProcessingBatch, KVCache.stock_class, LRUPromptCache):
        _rebind(holder, by_id)
    for name, module in sys.modules.copy().items():
        if not issubclass(type(module), ModuleType) or name.split(".")[0] == "mlx_paged":
            continue
        try:
            _rebind(module, by_id)
        except Exception as error:
            refused.append(f"{name} ({error!r})")
    if refused:
        message = f"cannot rebind mlx-lm's functions in these modules: {', '.join(refused)}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _rebind(holder: object, by_id: Mapping[int, Callable[..., Any]]) -> None:
    namespace = object.__getattribute__(holder, "__dict__")  # vars() would load a lazy module
    for name, value in namespace.copy().items():
        if id(value) in by_id:
            setattr(holder, name, by_id[id(value)])


def patch_mlx_lm(*, block_size: int = BLOCK_SIZE, kv_memory: int | None = None) -> None:
    """Let mlx-lm make paged caches and attend through them, until :func:`unpatch_mlx_lm`.

    ``generate``, ``stream_generate``, ``batch_generate``, ``BatchGenerator``, speculative decoding,
    ``LRUPromptCache`` and the server then use paged caches without a change. Existing caches stay
    as they are; a batch that they join takes copies of them. Modules that bound mlx-lm's functions
    to names of their own before get the paged ones too; a warning names a module that refuses.
    Prompt caches are saved in mlx-lm's own format. A second call only replaces the options.

    Args:
        block_size: token slots in a block.
        kv_memory: bytes of K/V at most, for each model and thread; default what the device has
            left when a pool grows.

    Raises:
        ValueError: an option is below 1, or the device cannot hold `kv_memory`.
        UntestedVersionError: the installed mlx-lm is not a tested version. The environment variable
            MLX_PAGED_ALLOW_UNTESTED_MLX_LM=1 allows every version.
    """
    options = _checked(block_size, kv_memory)
    with _patch.lock:
        _patch.lasting = options
        _patch.update()


def unpatch_mlx_lm() -> None:
    """Undo :func:`patch_mlx_lm`, if it was called. Open contexts of :func:`patched_mlx_lm` stay."""
    with _patch.lock:
        _patch.lasting = None
        _patch.update()


@contextmanager
def patched_mlx_lm(*, block_size: int = BLOCK_SIZE, kv_memory: int | None = None) -> Iterator[None]:
    """As :func:`patch_mlx_lm`, within this context. Contexts may nest and overlap in several
    threads: the options of the latest one entered hold for all."""
    options = _checked(block_size, kv_memory)
    try:
        with _patch.lock:
            _patch.scopes.append(options)
            _patch.update()
        yield
    finally:
        with _patch.lock:
            _patch.scopes[:] = [scope for scope in _patch.scopes if scope is not options]
            _patch.update()


def _checked(block_size: int, kv_memory: int | None) -> Options:
    if mlx_lm.__version__ not in TESTED_MLX_LM and os.environ.get(OVERRIDE) != "1":
        raise UntestedVersionError(
            f"mlx-lm {mlx_lm.__version__} is installed; paged caches are tested with "
            f"{', '.join(TESTED_MLX_LM)}. Install one of these, or set {OVERRIDE}=1 to go on."
        )
    check_options("patch_mlx_lm", block_size, kv_memory)
    return {"block_size": block_size, "kv_memory": kv_memory}
