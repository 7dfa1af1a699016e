"""ModelCore: an EngineCore of a model: its memory, its adapters, its end."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged.adapters.store import Adapter, AdapterFiles, AdapterStore
from mlx_paged.arguments import require, require_flags
from mlx_paged.engine.core import EngineCore
from mlx_paged.engine.models import EngineParts
from mlx_paged.engine.one_thread import exclusive
from mlx_paged.kv.memory import MemoryBudget
from mlx_paged.request import FinishReason
from mlx_paged.runner.pooled_model import PooledModel


class ModelCore(EngineCore):
    """The engine of the parts that a model gives, before it has calls that wait."""

    def __init__(self, parts: EngineParts, **options: Any) -> None:
        self._models, self.ledger = parts.models, parts.ledger
        self._processes = parts.models.processes
        runner, instruments = parts.models.runner, parts.instruments
        super().__init__(parts.scheduler, runner, parts.stats, instruments=instruments, **options)
        if parts.models.adapters is not None:
            self._make_request.variant_of = parts.models.adapters.find

    @property
    def manager(self) -> PooledModel:
        """The model's pool of K/V blocks and their allocator."""
        return self._models.pooled

    @property
    def memory_budget(self) -> MemoryBudget:
        """What the engine takes of the device's memory at most."""
        return self._models.budget

    # Adapters

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that requests may have, by name. Any thread may read them."""
        return {} if self._models.adapters is None else self._models.adapters.named

    def read_adapter(self, name: str, path: str | PathLike[str]) -> AdapterFiles:
        """What :meth:`load_adapter` takes in the place of a path. Any thread may call this, beside
        the thread that steps: the files are read, converted and hashed here. Raises ValueError as
        :meth:`load_adapter`."""
        is_path = isinstance(path, str | PathLike)
        require(is_path, "load_adapter", "path", path, "the folder of an adapter")
        return self._adapters("load_adapter", name).read(name, Path(path))

    def prepare_adapter(self, name: str) -> None:
        """Read the adapter with this name, unless it is in memory. Any thread may call this before
        it adds a request, beside the thread that steps: no step reads files then. Does nothing if
        no adapter has the name.

        Raises:
            ValueError: the adapter's files have changed since it was loaded, or cannot be read.
        """
        self._adapters("prepare_adapter", name).prepare(name)

    @exclusive
    def load_adapter(self, name: str, path: str | PathLike[str] | AdapterFiles) -> Adapter:
        """Give an adapter in a folder of ``mlx_lm.lora`` or PEFT a name. If another one has the
        name, requests under way keep that one, and new requests get the new one.

        Raises:
            ValueError: the engine was made without `adapters`, or the folder has no adapter of the
                model's linear layers, or the adapter is larger than `adapter_memory`.
        """
        files = path if isinstance(path, AdapterFiles) else self.read_adapter(name, path)
        return self._adapters("load_adapter", name).load(name, files)

    @exclusive
    def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away. Requests that have the adapter go on, and its memory is
        free after the last of them. Raises ValueError if no adapter has the name."""
        if not self._adapters("unload_adapter", name).unload(name):
            expected = f"one of {', '.join(sorted(self.adapters)[:20]) or 'none'}"
            require(False, "unload_adapter", "name", name, expected)

    @exclusive
    def update_adapter(
        self,
        name: str,
        arrays: Mapping[str, mx.array],
        scale: float | None = None,
        end_requests: bool = False,
    ) -> Adapter:
        """Give an adapter, or a new one, these numbers, for example after each step of a training.

        Requests under way go on with the numbers with which they began; K/V of other numbers is
        not shared. ``Completion.adapter_version`` is the version of the adapter that is returned.

        Args:
            arrays: by the names that mlx-lm gives them, such as
                ``model.layers.0.self_attn.q_proj.lora_a``: ``dict(tree_flatten(
                model.trainable_parameters()))`` of a model of ``mlx_lm.tuner``.
            scale: of the terms; None: that of the arrays with which the adapter was made.
            end_requests: abort the requests that have the numbers of before. Their completions have
                the tokens so far.

        Raises:
            ValueError: the engine was made without `adapters`, or arrays are no factors of the
                model's linear layers, or there is no scale.
        """
        store = self._adapters("update_adapter", name)
        require_flags("update_adapter", end_requests=end_requests)
        before = self.adapters.get(name)
        if scale is None:
            is_known = before is not None and before.folder is None
            require(is_known, "update_adapter", "scale", scale, "the scale of a new adapter")
            assert before is not None
            scale = before.scale
        made = store.load_arrays(name, arrays, scale)
        if end_requests and before is not None:
            for request in [r for r in self._requests.values() if r.variant is before]:
                self._end(request, FinishReason.ABORT)
            self._release_states()
        return made

    def _adapters(self, call: str, name: object) -> AdapterStore:
        store = self._models.adapters
        if store is None:
            raise ValueError(f"[{call}] the engine has no adapters: expected Engine(adapters={{}})")
        require(isinstance(name, str) and bool(name), call, "name", name, "a name")
        return store

    # Memory

    @exclusive
    def warm_up(self) -> None:
        """Compile the GPU pipelines, and trace the decodes for the thread that calls this."""
        self.stats.prewarm_seconds = self._models.warm_up()
        self.stats.memory_budget = self.memory_budget.parts
