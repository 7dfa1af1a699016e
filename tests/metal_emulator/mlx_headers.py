"""The Metal headers that the installed mlx wheel brings along."""

from importlib.util import find_spec
from pathlib import Path

KERNELS = Path("mlx/backend/metal/kernels")


def mlx_include_dir() -> Path:
    """The directory to search for #include "mlx/backend/metal/kernels/..."."""
    spec = find_spec("mlx")
    assert spec is not None and spec.submodule_search_locations is not None
    # Any directory named mlx on the path is part of the namespace package.
    include_dirs = [Path(place) / "include" for place in spec.submodule_search_locations]
    return next(directory for directory in include_dirs if (directory / KERNELS).is_dir())
