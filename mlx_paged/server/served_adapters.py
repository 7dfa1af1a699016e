"""Adapters that requests may name: those of flags, and folders under ``--adapters-dir``."""

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from mlx_paged.adapters.formats import CONFIG, MLX_TENSORS, PEFT_TENSORS
from mlx_paged.engine.service import EngineService
from mlx_paged.protocol.fields import Fields
from mlx_paged.protocol.model_paths import DEFAULT
from mlx_paged.protocol.request_body import Refusal

LOGGER = logging.getLogger(__name__)

MOST_NAMES = 1000
LONGEST_NAME = 200


class Entry(NamedTuple):
    """An adapter in the list of models. `root` is where it is under ``--adapters-dir``, else its
    name: no other path of the disk is told."""

    name: str
    root: str


class ServedAdapters:
    """The adapters of the default model, by name. Any thread may use it.

    ``args.adapters`` has their folders, and a model that is loaded again gets all of them.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._changing = Lock()  # one load at a time: the engine and `args` have the same names
        self._root: Path | None = None
        if args.adapters_dir is not None:
            self._root = Path(args.adapters_dir).resolve()
            args.adapters = args.adapters or {}

    def asked(self, fields: Fields, served: list[str]) -> tuple[str, str | None]:
        """The name of the model and of the adapter that a request asks for: by `adapters`, by the
        adapter's name as `model`, or by ``model:adapter``."""
        model, given = fields["model"], fields["adapters"]
        known = self._args.adapters or {}
        if given not in (None, DEFAULT):
            return model, given
        if model in served:
            return model, None
        if model in known:
            return DEFAULT, model
        base, is_both, adapter = model.rpartition(":")
        return (base, adapter) if is_both and adapter in known else (model, None)

    def use(self, service: EngineService, given: str) -> str:
        """The name by which the engine has an adapter, which is read if it is not in memory, and
        loaded if a folder under ``--adapters-dir`` is given that has no name yet. Raises Refusal if
        it may not be used, and ValueError if it cannot be."""
        known = self._args.adapters or {}
        if given in known:
            try:
                service.prepare_adapter(given)
            except ValueError:  # its message has a path
                LOGGER.warning("adapter %r cannot be read again", given, exc_info=True)
                message = f"adapters: the files of {given!r:.200} have changed: expected a new load"
                raise Refusal(400, message, param="adapters") from None
            return given
        folder = self._folder(given)
        name = self._path_of(folder)
        with self._changing:
            if name not in known:
                self._load(service, name, folder)
        return name

    def _load(self, service: EngineService, name: str, folder: Path) -> None:
        """Load the adapter of a folder under a name. Raises ValueError if that cannot be."""
        known = self._args.adapters
        if name not in known and len(known) >= MOST_NAMES:
            raise ValueError(f"adapters: {MOST_NAMES} have names, expected no more: unload some")
        read = service.call(lambda engine: engine.read_adapter)
        files = read(name, folder)  # in this thread: steps go on meanwhile
        service.call(lambda engine: engine.load_adapter(name, files))
        known[name] = folder

    def load_named(self, service: EngineService, body: Any, served: list[str]) -> str:
        """Load what a request of vLLM's ``load_lora_adapter`` asks for; return its name."""
        name, path = (_text(body, key) for key in ("lora_name", "lora_path"))
        again = body.get("load_inplace", False)
        if not isinstance(again, bool):
            raise ValueError("load_inplace: expected true or false")
        if name in (DEFAULT, *served) or ":" in name or not name.isprintable():
            raise ValueError("lora_name: expected a name without ':' that no model has")
        folder = self._folder(path, "lora_path")
        with self._changing:
            if name in self._args.adapters and not again:
                expected = "expected load_inplace or another name"
                raise ValueError(f"lora_name: {name} is loaded, {expected}")
            self._load(service, name, folder)
        return name

    def unload_named(self, service: EngineService, body: Any) -> str:
        """Take away the name that a request of vLLM's ``unload_lora_adapter`` gives."""
        name = _text(body, "lora_name")
        with self._changing:
            if name not in self._args.adapters:
                raise _not_served(name, "lora_name")
            service.call(lambda engine: engine.unload_adapter(name))
            del self._args.adapters[name]
        return name

    def listed(self) -> Iterator[Entry]:
        """The adapters that have names."""
        for name, folder in list((self._args.adapters or {}).items()):
            path = Path(folder).resolve()
            is_within = self._root is not None and path.is_relative_to(self._root)
            yield Entry(name, self._path_of(path) if is_within else name)

    def _path_of(self, folder: Path) -> str:
        assert self._root is not None
        return folder.relative_to(self._root).as_posix()

    def _folder(self, given: str, field: str = "adapters") -> Path:
        """The real folder of an adapter under ``--adapters-dir``, which a field of a request gives.
        Its files are there, too. No message of a Refusal tells what else is on the disk."""
        if self._root is None:
            raise _not_served(given, field)
        try:
            folder = (self._root / given).resolve()
            names = CONFIG, MLX_TENSORS, PEFT_TENSORS
            files = [folder / name for name in names if (folder / name).exists()]
            places = folder, *(file.resolve() for file in files)
            is_within = all(place.is_relative_to(self._root) for place in places)
            are_files = len(files) > 1 and all(file.is_file() for file in files)
        except (OSError, ValueError, RuntimeError):  # a null character, a loop of links
            raise _not_served(given, field) from None
        if folder == self._root or not (is_within and are_files):
            raise _not_served(given, field)
        return folder


def _not_served(name: str, field: str) -> Refusal:
    expected = {
        "lora_name": "a name of /v1/models that an adapter has",
        "lora_path": "a folder of an adapter under --adapters-dir",
        "adapters": "a name of /v1/models, or a folder under --adapters-dir",
    }
    message = f"{field}: adapter {name!r:.200} is not served here: expected {expected[field]}"
    return Refusal(404, message, "model_not_found", field)


def _text(body: Any, key: str) -> str:
    value = body.get(key) if isinstance(body, dict) else None
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
        raise ValueError(f"{key}: expected a text of 1 to {LONGEST_NAME} characters")
    return value
