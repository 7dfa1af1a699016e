"""A folder with a model's published weights, of which a few tensors are read."""

import json
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged.tensor_files import MAX_HEADER, Stored, header

INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The configuration and the tensors of a folder as the hub has it. A file is opened when one of
    its tensors is asked for.

    Attributes:
        model_type: the architecture.
        config: of the language model.
        files: the file of each tensor by its name.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if the folder lacks a file, or a file has something else than named."""
        self.folder = folder
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such directory")
        whole = read_json(folder / "config.json")
        self.model_type = str(whole.get("model_type"))
        self.config = dict(_object(whole.get("text_config", whole), "text_config"))
        quantization = whole.get("quantization_config", self.config.get("quantization_config"))
        self.config["quantization_config"] = quantization
        self._headers: dict[str, dict[str, Stored]] = {}
        self.files = self._indexed() if (folder / INDEX).is_file() else self._found()

    def stored(self, names: Iterable[str]) -> dict[str, Stored]:
        """What the headers say of these tensors. Raises ValueError if a file lacks one."""
        found = {}
        for name in names:
            file = self.files[name]
            if name not in self._header(file):
                raise ValueError(f"{self.folder}: {file} has no {name}, which the index names")
            found[name] = self._header(file)[name]
        return found

    def load(self, names: Iterable[str]) -> dict[str, mx.array]:
        """The tensors, which are read when they are evaluated. Those in FP8 are of uint8."""
        loaded: dict[str, mx.array] = {}
        wanted = set(self.stored(names))
        for file in sorted({self.files[name] for name in wanted}):
            arrays = mx.load(str(self.folder / file))
            assert isinstance(arrays, dict)
            loaded |= {name: arrays[name] for name in wanted & arrays.keys()}
        return loaded

    def _indexed(self) -> dict[str, str]:
        files = _object(read_json(self.folder / INDEX).get("weight_map"), "weight_map")
        for file in {str(file) for file in files.values()}:
            if Path(file).name != file or not (self.folder / file).is_file():
                raise ValueError(f"{self.folder}: {INDEX} names {file}, which is no file of it")
        return {name: str(file) for name, file in files.items()}

    def _found(self) -> dict[str, str]:
        found = sorted(self.folder.glob("model*.safetensors"))
        if not found:
            raise ValueError(f"{self.folder}: it has no model*.safetensors")
        return {name: file.name for file in found for name in self._header(file.name)}

    def _header(self, file: str) -> dict[str, Stored]:
        if file not in self._headers:
            try:
                self._headers[file] = header(self.folder / file)[0]
            except ValueError as error:
                raise ValueError(f"{self.folder}: {error}") from error
        return self._headers[file]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file of JSON. Raises ValueError if there is no such file or no object."""
    if not file.is_file():
        raise ValueError(f"{file.parent}: it has no {file.name}")
    if file.stat().st_size > MAX_HEADER:
        raise ValueError(f"{file} has more than {MAX_HEADER} bytes")
    try:
        return _object(json.loads(file.read_bytes()), file.name)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{file} is no JSON object") from error


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no JSON object")
    return deepcopy(value)
