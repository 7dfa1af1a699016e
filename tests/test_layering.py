"""Imports run downward only, and the bookkeeping knows no mlx."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_paged

PACKAGE = Path(mlx_paged.__file__).parent

ORDER = [
    "server",
    "server_http",
    "server_answers",
    "server_backend",
    "server_metrics",
    "server_engine_metrics",
    "server_choice",
    "server_request",
    "server_watch",
    "server_args",
    "generate",
    "generate_report",
    "generate_jobs",
    "generate_args",
    "common_args",
    "model_loader",
    "prompts_file",
    "batch_generator",
    "batch_sequences",
    "batch_arguments",
    "batch_response",
    "contiguous_caches",
    "step_recorder",
    "service",
    "ticket",
    "engine",
    "engine_core",
    "engine_steps",
    "request_arguments",
    "one_thread",
    "growing_allocator",
    "interrupts",
    "output_processor",
    "prompt_encoder",
    "text_stream",
    "tick_recorder",
    "tick_writer",
    "tick_log",
    "tick_spikes",
    "tick",
    "gc_pauses",
    "stats",
    "auto_patch",
    "patch",
    "ragged_prompts",
    "stock_caches",
    "prompt_cache",
    "batch_prompt_cache",
    "paged_cache",
    "shared_pool",
    "pool_layer",
    "layer_step",
    "paged_sequence",
    "row_step",
    "row_spans",
    "growing_pool",
    "growing_allocator",
    "wired_limit",
    "kv_memory",
    "beam_requests",
    "beam_search",
    "profiling",
    "phase_times",
    "model_runner",
    "sampling",
    "penalties",
    "sampling_rows",
    "recurrent_states",
    "model_probe",
    "last_layer",
    "logit_rows",
    "prewarm",
    "mlx_lm_cache",
    "batch_attention",
    "latent_handles",
    "sdpa_hook",
    "cpu_layers",
    "dispatch",
    "path_table",
    "batch",
    "batch_rows",
    "batch_tables",
    "outputs",
    "step_pipeline",
    "scheduler",
    "chunk_budget",
    "shared_prefill",
    "kv_reads",
    "step",
    "victims",
    "waiting_queue",
    "cost_model",
    "snapshot_plan",
    "request",
    "sampling_params",
    "block_manager",
    "kv_pool",
    "block_allocator",
    "block_store",
    "block_refs",
    "allocation",
    "sequence_blocks",
    "stateful_prefixes",
    "prefix_cache",
    "snapshots",
    "block_tables",
    "ops",
    "arguments",
    "reference_mlx",
    "reference",
    "_ext",
]
"""Every module; each imports only from those after it."""

NO_MLX = {
    "allocation",
    "arguments",
    "beam_requests",
    "beam_search",
    "block_allocator",
    "block_refs",
    "block_store",
    "block_tables",
    "chunk_budget",
    "common_args",
    "cost_model",
    "dispatch",
    "engine_core",
    "engine_steps",
    "gc_pauses",
    "growing_allocator",
    "interrupts",
    "kv_reads",
    "one_thread",
    "output_processor",
    "outputs",
    "path_table",
    "phase_times",
    "prefix_cache",
    "prompt_encoder",
    "prompts_file",
    "request",
    "request_arguments",
    "sampling_params",
    "scheduler",
    "sequence_blocks",
    "server_request",
    "server_watch",
    "shared_prefill",
    "snapshot_plan",
    "snapshots",
    "stateful_prefixes",
    "stats",
    "step",
    "step_pipeline",
    "text_stream",
    "tick",
    "tick_log",
    "tick_recorder",
    "tick_spikes",
    "tick_writer",
    "ticket",
    "victims",
    "waiting_queue",
}


def modules() -> list[str]:
    return sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imported(module: str) -> set[str]:
    """Modules of this package that `module` imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "mlx_paged":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_paged."):
            names.add(str(node.module).split(".")[1])
    return names


def test_every_module_has_its_place():
    assert set(modules()) <= set(ORDER)


@pytest.mark.parametrize("module", modules())
def test_imports_run_downward(module):
    below = ORDER[ORDER.index(module) + 1 :]
    assert imported(module) <= set(below)


def test_bookkeeping_imports_without_mlx():
    code = (
        "import sys, types; sys.modules['mlx'] = sys.modules['mlx.core'] = None;"
        f"package = types.ModuleType('mlx_paged'); package.__path__ = [{str(PACKAGE)!r}];"
        "sys.modules['mlx_paged'] = package;"
        + "".join(f"import mlx_paged.{module};" for module in sorted(NO_MLX))
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_the_contract():
    assert sorted(mlx_paged.__all__) == [
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
        "install_in_mlx",
        "make_prompt_cache",
        "paged_attention",
        "patch_mlx_lm",
        "patched_mlx_lm",
        "uninstall_from_mlx",
        "unpatch_mlx_lm",
        "write_kv",
    ]
    for name in mlx_paged.__all__:
        assert getattr(mlx_paged, name).__doc__, f"{name} has no documentation"
