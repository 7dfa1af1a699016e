"""Rooms import in one direction, and the bookkeeping knows no mlx."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

import mlx_paged

PACKAGE = Path(mlx_paged.__file__).parent

REQUESTS = {
    "arguments",
    "options",
    "option_kinds",
    "prompt",
    "request",
    "sampling_params",
    "outputs",
    "constraint",
}
COMMAND = {
    *("cli", "config_file", "interrupts", "launched", "loading", "model_folders", "starting"),
}
MAY_IMPORT = {
    "server": {
        *("adapters", "protocol", "formats", "engine", "vision", "runner", "metrics", "kv"),
        "tensor_files",
        "holdings",
        *COMMAND,
        *REQUESTS,
    },
    "generate": {
        *("protocol", "chat", "engine", "vision", "runner", "metrics"),
        *COMMAND,
        *REQUESTS,
    },
    "protocol": {"formats", "chat", "engine", "vision", *REQUESTS},
    "terminal": {"engine", *COMMAND, *REQUESTS},
    "doctor": {
        *("engine", "drop_in", "metrics", "attention", "kv", "ops", "command_buffers"),
        "system_memory",
        *COMMAND,
        *REQUESTS,
    },
    "batch_generator": {"engine", "runner", "scheduler", "kv", *REQUESTS},
    "auto_patch": {"drop_in"},
    "run": {"arguments", "cli", "drop_in", "options", "starting"},
    "drop_in": {"arguments", "options", "runner", "attention", "kv", "ops"},
    "engine": {
        *(
            "adapters",
            "chat",
            "formats",
            "vision",
            "runner",
            "heads",
            "metrics",
            "scheduler",
            "attention",
            "sampling",
            "kv_disk",
            "kv",
            "pressure",
            "holdings",
            "system_memory",
            *REQUESTS,
        )
    },
    "adapters": {
        "arguments",
        "holdings",
        "options",
        "runner",
        "ops",
        "system_memory",
        "tensor_files",
    },
    "pressure": set[str](),
    "formats": {"chat", "outputs", "sampling_params"},
    "vision": {"arguments", "holdings", "chat", "cli", "prompt", "runner", "kv", "ops"},
    "chat": set[str](),
    "launched": set[str](),
    "loading": {"option_kinds", "cli", "launched", "model_folders", "options", "vision", "runner"},
    "model_folders": set[str](),
    "cli": {"arguments", "model_folders", "option_kinds", "options"},
    "config_file": {"arguments", "cli"},
    "interrupts": set[str](),
    "starting": {"command_buffers", "interrupts"},
    "command_buffers": set[str](),
    "system_memory": set[str](),
    "tensor_files": set[str](),
    "holdings": set[str](),
    "__main__": {"cli", "command_buffers", "interrupts", "starting"},
    "heads": {"arguments", "cli", "starting", "tensor_files"},
    "runner": {
        *("launched", "sampling", "metrics", "scheduler", "attention", "heads", "kv", "ops"),
        *("command_buffers", "holdings", "system_memory"),
        *REQUESTS,
    },
    "sampling": {"ops", *REQUESTS},
    "metrics": {"scheduler", "kv", *REQUESTS},
    "scheduler": {"holdings", "kv", *REQUESTS},
    "kv_disk": {"cli", "holdings", "kv", "ops", "request", "starting"},
    "attention": {"kv", "ops"},
    "outputs": {"request", "sampling_params", "kv"},
    "request": {"constraint", "kv", "prompt", "sampling_params"},
    "constraint": {"sampling_params"},
    "prompt": set[str](),
    "sampling_params": {"arguments"},
    "kv": {"arguments", "holdings", "options", "ops", "system_memory"},
    "ops": {"_ext", "arguments"},
    "options": {"arguments", "option_kinds"},
    "option_kinds": {"arguments"},
    "arguments": set[str](),
}
"""A room (folder or module of the package) and the rooms that it may import."""

NO_MLX = [
    *(f"{room}.*" for room in ("formats", "scheduler", "metrics", "chat")),
    *(
        "arguments",
        "cli",
        "launched",
        "model_folders",
        "option_kinds",
        "options",
        "outputs",
        "request",
        "sampling_params",
        "command_buffers",
        "constraint",
        "starting",
        "system_memory",
        "tensor_files",
        "holdings",
    ),
    *("kv_disk.packs", "kv_disk.store", "kv_disk.tier"),
    *("kv.allocator", "kv.blocks", "kv.block_tables", "kv.prefix_cache", "kv.snapshots"),
    *(
        "kv.snapshot_plan",
        "kv.state_ends",
        "kv.state_kind",
        "kv.states",
        "generate.batch_lines",
        "generate.given",
        "generate.prompts_file",
        "runner.plan",
    ),
    *("engine.beams", "engine.core", "engine.pipeline", "engine.text", "engine.ticket"),
    "heads.mtp_layouts",
    *("engine.detokenizer", "engine.spelling", "engine.token_ids"),
    *("engine.waiting_calls", "sampling.grammar"),
    *(
        "protocol.client_tools",
        "protocol.constraints",
        "protocol.deltas",
        "protocol.fields",
        "protocol.images",
    ),
    *("protocol.json_text", "protocol.long_work", "protocol.messages", "protocol.model_paths"),
    *("protocol.request_body", "protocol.responses", "protocol.turns"),
    *("engine.pool_size", "pressure.ladder", "pressure.system", "pressure.watch"),
    *("server.keys", "server.log_format", "server.sockets", "server.workers"),
    *("vision.images", "vision.flags", "vision.image_spans", "vision.kept_features", "prompt"),
]
"""Modules that import where there is no mlx; ``room.*`` names all modules of a room."""


def modules() -> list[Path]:
    """Every module but the package itself, relative to it."""
    found = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return sorted(path for path in found if path != Path("__init__.py"))


def imported_by(module: Path) -> set[str]:
    """What a module imports of this package, as ``room`` or ``room.file``; for type hints too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        if isinstance(node, ast.ImportFrom):
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                is_file = (PACKAGE.parent / name.replace(".", "/")).with_suffix(".py").exists()
                is_room = node.module == "mlx_paged"
                names.add(name if is_file or is_room else str(node.module))
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("mlx_paged.") for name in names if name.startswith("mlx_paged.")}


def rooms_imported_by(module: Path) -> set[str]:
    """Other rooms of this package that a module imports."""
    return {name.split(".")[0] for name in imported_by(module)} - {room_of(module)}


def room_of(module: Path) -> str:
    return Path(module.parts[0]).stem


@pytest.mark.sampled(4)
@pytest.mark.parametrize("module", modules(), ids=str)
def test_a_module_imports_only_what_its_room_may(module):
    assert rooms_imported_by(module) <= MAY_IMPORT[room_of(module)]


def assert_no_circle(imports: Mapping[str, set[str]]) -> None:
    left = dict(imports)
    while left:
        grounded = [name for name, below in left.items() if not below & left.keys()]
        assert grounded, f"a circle among {sorted(left)}, or they import one"
        for name in grounded:
            del left[name]


def test_the_rule_has_no_circle():
    assert_no_circle(MAY_IMPORT)


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle():
    names = {module: ".".join(module.with_suffix("").parts) for module in modules()}
    assert_no_circle(
        {name.removesuffix(".__init__"): imported_by(module) for module, name in names.items()}
    )


@pytest.mark.slow
def test_bookkeeping_imports_without_mlx():
    names = []
    for pattern in NO_MLX:
        paths = PACKAGE.glob(pattern.replace(".", "/") + ".py")
        found = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths]
        assert found, f"{pattern} names no module"
        names += [name.removesuffix(".__init__") for name in found]
    code = "import sys; sys.modules['mlx'] = sys.modules['mlx.core'] = None;" + "".join(
        f"import mlx_paged.{name};" for name in sorted(names)
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
    for name in mlx_paged.__all__:
        assert getattr(mlx_paged, name).__doc__, f"{name} has no documentation"


def test_the_version_is_that_of_the_project():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert mlx_paged.__version__ == project["version"]
