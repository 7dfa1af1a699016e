"""What the names of models mean: all spellings of a model become one."""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants, scan_cache_dir

from mlx_paged.protocol.model_paths import (
    DEFAULT,
    cached_snapshot,
    directory_of,
    is_last_part_of,
    is_path_of,
)
from mlx_paged.protocol.request_body import Refusal
from mlx_paged.server import model_files


class Known(NamedTuple):
    """A model that requests may name, beside the default one."""

    name: str
    directory: Path  # its real path, by which the server holds it


class ModelNames:
    """Finds the model that a name means. Any thread may call it.

    The default model is known by the path of ``--model``, as it is given; any other model by the
    real path of its directory.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.default: str = args.model
        self.served: list[str] = args.served_model_name or [args.model]

    @property
    def serves_others(self) -> bool:
        """Whether a model beside the default one can be loaded."""
        return bool(self.args.max_models > (0 if self.args.unpin_default else 1))

    def label(self, path: str) -> str:
        """What metrics call the model at `path`: the name that it is served under."""
        return self.served[0] if path == self.default else path

    def is_operators(self, path: str) -> bool:
        """Whether a flag names the model at `path`, so that ``--trust-remote-code`` holds for
        it."""
        return path == self.default or any(
            str(known.directory) == path for known in self._operators()
        )

    def path(self, name: str) -> str:
        """What to load for the model that a request names. Raises Refusal if it may not be loaded;
        the message does not tell whether a directory that no flag lists is there."""
        if name in self.served or is_path_of(name, self.default):
            return self.default
        known = self._known(name, directory_of(name)) if self.args.max_models else None
        if known is None and is_last_part_of(name, self.default):
            return self.default
        if known is not None and known.directory == directory_of(self.default):
            return self.default
        if known is None:
            expected = f"expected {self.served[0]}, {DEFAULT} or another name of /v1/models"
            message = f"model {name!r:.200} is not served here: {expected}"
            raise Refusal(404, message, "model_not_found", "model")
        if not self.serves_others:
            message = f"model {name!r:.200} has no place beside {self.served[0]}"
            needed = "start with --max-models 2, or with --unpin-default"
            raise Refusal(404, f"{message}: {needed}", "model_not_found", "model")
        return str(known.directory)

    def others(self) -> list[Known]:
        """Models beside the default one that can be loaded, by their files."""
        found = dict[Path, Known]()
        if not self.serves_others:
            return []
        repositories = cached_repositories() if self._may_use_cache else []
        for known, trusts in (
            *((known, self.args.trust_remote_code) for known in self._operators()),
            *((known, False) for known in repositories),
        ):
            if known.directory in (*found, directory_of(self.default)):
                continue
            if model_files.problem(known.directory, trusts, self.args.vision) is None:
                found[known.directory] = known
        return sorted(found.values())

    @property
    def _may_use_cache(self) -> bool:
        """Whether requests may name what is in the hub's cache: who asks works on this machine."""
        return self.args.allow_models is None and (
            self.args.uds is not None or _is_loopback(self.args.host)
        )

    def _known(self, name: str, directory: Path | None) -> Known | None:
        """The model that `name`, a name or a path of `directory`, means beside the default one."""
        for known in self._operators():
            if known.name == name or known.directory == directory:
                return known
        snapshot = cached_snapshot(name) if self._may_use_cache else None
        return None if snapshot is None else Known(name, snapshot)

    def _operators(self) -> Iterator[Known]:
        """Models that ``--models-dir`` and ``--allow-models`` list."""
        if self.args.models_dir is not None:
            root = Path(self.args.models_dir)
            for pattern in ("*/config.json", "*/*/config.json"):
                for file in root.glob(pattern):
                    name = file.parent.relative_to(root).as_posix()
                    yield Known(name, file.parent.resolve())
        for name in filter(None, self.args.allow_models or ()):
            directory = directory_of(name)
            if directory is not None:
                yield Known(name, directory)


def cached_repositories() -> list[Known]:
    """All models in the hub's cache."""
    with suppress(Exception):  # there is no cache
        ids = [
            repo.repo_id
            for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos
            if repo.repo_type == "model"
        ]
        snapshots = ((name, cached_snapshot(name)) for name in ids)
        return [Known(name, directory) for name, directory in snapshots if directory is not None]
    return []


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
