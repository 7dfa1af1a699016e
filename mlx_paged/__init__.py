"""Paged attention and continuous batching for mlx-lm."""

from importlib.metadata import version

import mlx.core  # noqa: F401  registers the array type that the compiled module shares

from mlx_paged.arguments import require_versions

require_versions()

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
from mlx_paged.outputs import Beam, Completion, TokenOutput
from mlx_paged.request import FinishReason
from mlx_paged.runner.model_probe import UnsupportedModelError
from mlx_paged.sampling_params import SamplingParams

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

__version__ = version("mlx_paged")
