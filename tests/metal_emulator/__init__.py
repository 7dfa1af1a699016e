"""Runs Metal kernels on x86-64 Linux and reports what a GPU would not: see README.md."""

from .findings import EmulatorFinding, Finding, FindingKind
from .gpu_compiler import GpuCode, gpu_code
from .language.tokens import TranslationError
from .launch import LaunchStats, Lines, Result, UniqueBytes
from .library import Library
from .mlx_headers import mlx_include_dir
from .modes import Mode
from .pytest_support import require_emulator
from .toolchain import CompileError, ToolchainMissing
from .typecheck import typecheck

__all__ = [
    "CompileError",
    "EmulatorFinding",
    "Finding",
    "FindingKind",
    "GpuCode",
    "LaunchStats",
    "Library",
    "Lines",
    "Mode",
    "Result",
    "ToolchainMissing",
    "TranslationError",
    "UniqueBytes",
    "gpu_code",
    "mlx_include_dir",
    "require_emulator",
    "typecheck",
]
