"""Python imports this when it starts under ``python -m mlx_paged.run``."""

import json
import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class PatchOnImport:
    """Patches mlx-lm when mlx_lm is imported, or mlx_paged, which itself imports mlx_lm."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ("mlx_lm", "mlx_paged"):
            return None
        specs = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next(filter(None, specs), None)
        loader: Any = spec and spec.loader

        def exec_module(module: Any) -> None:
            vars(loader).pop("exec_module", None)
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            loader.exec_module(module)
            from mlx_paged.drop_in.patch import patch_mlx_lm

            patch_mlx_lm(**given["options"])
            if given["cache_limit"] is not None:
                import mlx.core as mx

                mx.set_cache_limit(given["cache_limit"])

        if loader:
            loader.exec_module = exec_module
        return spec


given = json.loads(os.environ.get("MLX_PAGED_RUN", "{}"))
if given.get("python") == [sys.prefix, sys.implementation.cache_tag]:
    sys.meta_path.insert(0, PatchOnImport())

# The environment's own sitecustomize follows. If it has none, Python ignores the error.
sys.path[:] = [path for path in sys.path if path != HERE]
del sys.modules["sitecustomize"]
__import__("sitecustomize")
