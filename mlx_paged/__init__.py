"""Paged attention and continuous batching for mlx-lm."""

from mlx_paged import interrupts

interrupts.guard_start()

TYPE_CHECKING = False  # not from `typing`, whose import takes longer than all of this package's

if TYPE_CHECKING:
    from typing import Any

    from mlx_paged.batch_generator.generator import BatchGenerator
    from mlx_paged.cli import demo_model_path
    from mlx_paged.drop_in.caches import make_prompt_cache
    from mlx_paged.drop_in.patch import patch_mlx_lm, patched_mlx_lm, unpatch_mlx_lm
    from mlx_paged.engine.engine import Engine
    from mlx_paged.engine.service import EngineService
    from mlx_paged.engine.ticket import Ticket
    from mlx_paged.kv.block_manager import KVBlockManager
    from mlx_paged.kv.blocks import OutOfBlocksError
    from mlx_paged.ops.paged import (
        copy_blocks,
        install_in_mlx,
        paged_attention,
        paged_attention_varlen,
        uninstall_from_mlx,
        write_kv,
    )
    from mlx_paged.outputs import Beam, Completion, TokenOutput, ToolCall
    from mlx_paged.request import FinishReason
    from mlx_paged.runner.model_probe import UnsupportedModelError
    from mlx_paged.sampling_params import SamplingParams

    __version__: str

__all__ = [
    "BatchGenerator",
    "Beam",
    "Completion",
    "Engine",
    "EngineService",
    "FinishReason",
    "KVBlockManager",
    "OutOfBlocksError",
    "SamplingParams",
    "Ticket",
    "TokenOutput",
    "ToolCall",
    "UnsupportedModelError",
    "copy_blocks",
    "demo_model_path",
    "install_in_mlx",
    "make_prompt_cache",
    "paged_attention",
    "paged_attention_varlen",
    "patch_mlx_lm",
    "patched_mlx_lm",
    "uninstall_from_mlx",
    "unpatch_mlx_lm",
    "write_kv",
]

_HOMES = {
    "BatchGenerator": "batch_generator.generator",
    "Beam": "outputs",
    "Completion": "outputs",
    "Engine": "engine.engine",
    "EngineService": "engine.service",
    "FinishReason": "request",
    "KVBlockManager": "kv.block_manager",
    "OutOfBlocksError": "kv.blocks",
    "SamplingParams": "sampling_params",
    "Ticket": "engine.ticket",
    "TokenOutput": "outputs",
    "ToolCall": "outputs",
    "UnsupportedModelError": "runner.model_probe",
    "copy_blocks": "ops.paged",
    "demo_model_path": "cli",
    "install_in_mlx": "ops.paged",
    "make_prompt_cache": "drop_in.caches",
    "paged_attention": "ops.paged",
    "paged_attention_varlen": "ops.paged",
    "patch_mlx_lm": "drop_in.patch",
    "patched_mlx_lm": "drop_in.patch",
    "uninstall_from_mlx": "ops.paged",
    "unpatch_mlx_lm": "drop_in.patch",
    "write_kv": "ops.paged",
}
"""The module of each exported name. A name is imported at its first use, so that the commands can
show their help without mlx."""

_ROOMS = {"attention", "batch_generator", "drop_in", "engine", "kv", "ops", "runner", "sampling"}
"""Folders that are attributes of the package without an import of their own."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> "Any":
        if name == "__version__":
            from importlib.metadata import version

            value = version("mlx_paged")
        elif name in _HOMES or name in _ROOMS:
            from importlib import import_module

            from mlx_paged.arguments import require_versions

            require_versions()
            module = import_module(f"mlx_paged.{_HOMES.get(name, name)}")
            value = getattr(module, name) if name in _HOMES else module
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
