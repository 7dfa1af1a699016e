"""The models that the server holds: loads them on demand and gives their memory back."""

import argparse
import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from mlx_paged.kv.memory import spare_memory
from mlx_paged.launched import rank
from mlx_paged.options import Policy
from mlx_paged.protocol.model_paths import directory_of
from mlx_paged.protocol.request_body import Refusal
from mlx_paged.runner.positions import positions
from mlx_paged.server import loaded_model, model_files
from mlx_paged.server.loaded_model import LoadingThread, Model
from mlx_paged.server.model_names import ModelNames
from mlx_paged.server.served_adapters import ServedAdapters

LOGGER = logging.getLogger(__name__)

NEWCOMERS = 8
"""One place more for each so many places, and at least one: for clients that have no completion
under way."""


class Models:
    """All loaded models by path.

    Any thread may use `start`, `path` and `listed`; only the thread of the event loop uses the
    rest.

    The default model is pinned unless ``--unpin-default``: only ``--idle-seconds`` unloads it, and
    it keeps its place meanwhile.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.loaded: dict[str, Model] = {}
        self.names = ModelNames(args)
        self.adapters = ServedAdapters(args)
        self._limits: dict[str, int] = {}  # `max_context` of models that were loaded, by path
        self._thread = LoadingThread()
        self._turn = asyncio.Lock()  # held while a model is loaded or unloaded
        self._leaving: Model | None = None  # takes no more requests
        self._places = args.decode_concurrency + args.max_queue
        self._under_way = Counter[tuple[str, str]]()  # completions by path and client

    @property
    def is_healthy(self) -> bool:
        """Whether completions can be computed."""
        return all(model.service.is_running for model in self.loaded.values())

    def start(self) -> None:
        """Load the default model, in the calling thread. Raises ValueError if that fails."""
        if rank() is not None:
            if self.args.max_models > 1 or self.args.idle_seconds:
                raise ValueError("--max-models or --idle-seconds under mlx.launch: expected none")
            self.args.max_models = 0
        self._make(self.names.default, self.args.max_models or 1)

    def close(self) -> None:
        for model in list(self.loaded.values()):
            loaded_model.release(model.service)
        self._thread.close()

    def listed(self) -> dict[str, int | None]:
        """The names of models that can be served, each with the tokens that prompt and completion
        may have: its limit if the model was loaded, else what its configuration says, None if that
        is no limit."""
        own = self._limits.get(self.names.default)
        found: dict[str, int | None] = dict.fromkeys(self.names.served, own)
        for known in self.names.others():
            found.setdefault(known.name, self._limit(str(known.directory)))
        return found

    def limit_of(self, name: str) -> int | None:
        """Tokens that prompt and completion of a model may have, as `listed` says. Raises Refusal
        if the model cannot be served."""
        path = self.names.path(name)
        if path not in self._limits:
            self._checked_size(path)
        return self._limit(path)

    def _limit(self, path: str) -> int | None:
        if path in self._limits:
            return self._limits[path]
        most: int | None = self.args.max_context
        return most or positions(model_files.configuration(Path(path)))

    @asynccontextmanager
    async def use(self, path: str, count: int, client: str = "") -> AsyncIterator[Model]:
        """The model at `path`, loaded and with `count` places for completions, or a Refusal. Where
        clients take turns, one that has no completion under way finds places that all the others
        together cannot take."""
        model = self.loaded.get(path)
        if model is None or model is self._leaving:
            async with self._turn:
                model = self.loaded.get(path) or await self._load(path)
        room, of_client = self._places, (path, client)
        if not self._under_way[of_client] and self.args.policy == Policy.FAIR:
            room += max(1, room // NEWCOMERS)
        if model.taken and model.taken + count > room:
            message = f"{model.taken} completions are under way or waiting: try again later"
            raise Refusal(503, message, "overloaded")
        model.take(count)
        self._under_way[of_client] += count
        try:
            yield model
        finally:
            model.take(-count)
            self._under_way[of_client] -= count
            if not self._under_way[of_client]:
                del self._under_way[of_client]

    async def unload_idle(self) -> None:
        """Unload each model that has had no request for `idle_seconds`. Runs until cancelled."""
        while self.args.idle_seconds:
            await asyncio.sleep(min(1.0, self.args.idle_seconds / 2))
            async with self._turn:
                for path in list(self.loaded):  # no name here may keep a model alive
                    unused = time.monotonic() - self.loaded[path].last_used
                    if not self.loaded[path].taken and unused > self.args.idle_seconds:
                        await self._unload(self.loaded[path])

    async def _load(self, path: str) -> Model:
        """Load a model in the place of the least recently used ones. The caller has the turn."""
        try:
            places = await self._make_room(path)
            await self._thread.run(self._make, path, places)  # to its end, also without its client
        except ValueError as error:
            raise Refusal(404, str(error), "model_not_found", "model") from error
        return self.loaded[path]

    async def _make_room(self, path: str) -> int:
        """Unload models until there is room for the one at `path`. Returns how many models may
        still be loaded. Raises Refusal or ValueError, before it unloads anything, if the model
        cannot be loaded."""
        size = await asyncio.to_thread(self._checked_size, path)
        most, is_pinned = max(1, self.args.max_models), not self.args.unpin_default
        places = most - 1 if is_pinned else most  # of models that are not pinned
        needs_place = not is_pinned or path != self.names.default
        is_checked = False
        while self.loaded:
            free = [m for m in self.loaded.values() if not self._is_pinned(m)]
            if not (needs_place and len(free) >= places) and size <= spare_memory():
                break
            if not free:
                message = f"model {path} has {size} bytes of weights: {self.names.served[0]} leaves"
                message += f" room for {spare_memory()}; start with --unpin-default"
                raise Refusal(404, message, "model_not_found", "model")
            if not is_checked:
                await self._thread.run(loaded_model.check, path, self.args, self._trusts(path))
                is_checked = True
            await self._unload(min(free, key=lambda model: model.last_used))
        return int(most) - len(self.loaded)

    def _checked_size(self, path: str) -> int:
        """Bytes of a model's weights. Raises Refusal if its files cannot be loaded."""
        directory = directory_of(path)
        if directory is None:  # the default model's, which has gone from the disk: loading tells
            return 0
        problem = model_files.problem(directory, self._trusts(path), self.args.vision)
        if problem is not None:
            raise Refusal(404, f"model {path}: {problem}", "model_not_found", "model")
        return model_files.weights_size(directory)

    def _is_pinned(self, model: Model) -> bool:
        return model.name == self.names.default and not self.args.unpin_default

    def _trusts(self, path: str) -> bool:
        """Whether the own code of the model at `path` may run."""
        return bool(self.args.trust_remote_code and self.names.is_operators(path))

    def _make(self, path: str, places: int) -> None:
        trusts = self._trusts(path)
        self.loaded[path] = model = loaded_model.make(path, self.args, places, trusts)
        self._limits[path] = model.max_context

    async def _unload(self, model: Model) -> None:
        """Free a model's memory when its requests have ended. More of them may come for
        ``--swap-seconds``; then those that come wait until a model is loaded for them."""
        if model.taken:
            with suppress(TimeoutError):
                await asyncio.wait_for(model.idle.wait(), self.args.swap_seconds)
        self._leaving = model
        try:
            if model.taken:
                await model.idle.wait()
            del self.loaded[model.name]
        finally:
            self._leaving = None
        LOGGER.info("unloading %s", model.name)
        await self._thread.run(loaded_model.release, model.service)
        model.service = None  # type: ignore[assignment]
        await self._thread.run(loaded_model.give_back)
