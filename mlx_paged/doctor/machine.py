"""Versions, the device and its limits, and the path that attention takes."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx
import mlx_lm

from mlx_paged import ops
from mlx_paged.arguments import TESTED_MLX_LM
from mlx_paged.attention.paths import ANY_NUMBER, VARIABLE, max_paged_queries
from mlx_paged.doctor.findings import Findings
from mlx_paged.doctor.kernels import kernels_in_use
from mlx_paged.doctor.panics import DAYS, FOLDER, recent_panics
from mlx_paged.doctor.system import system_facts
from mlx_paged.kv.default_pool import largest_default
from mlx_paged.kv.memory import default_cache_limit, device_memory, memory_in_use

GB = 1e9
LIMITS = ("max_recommended_working_set_size", "max_buffer_length")


def check_machine(found: Findings, quick: bool) -> None:
    """versions, the device, the path of attention"""
    mlx_version: str = mx.__version__  # type: ignore[attr-defined]
    device, built_with = mx.device_info(), ops.BUILT_WITH
    limits = {name.replace("_", " "): int(device[name]) for name in LIMITS if name in device}
    limits |= {"memory": device_memory(), "in use": memory_in_use()}
    limits["default pool"] = largest_default()
    limits |= {"cache limit": cache} if (cache := default_cache_limit(None, 0)) else {}
    versions = {
        "mlx_paged": _version("mlx-paged"),
        "mlx": mlx_version,
        "built with": built_with,
        "mlx-lm": mlx_lm.__version__,
        "tested mlx-lm": TESTED_MLX_LM,
        "Python": platform.python_version(),
    }
    facts = {
        "system": platform.platform(),
        "device": dict(device),
        "GB": {name: round(size / GB, 1) for name, size in limits.items()},
        "attention": attention_path(),
        "state": system_facts(),
    }
    found.numbers |= versions | facts
    found.lines.append(_text(versions))
    found.lines += [f"{name}: {_text(value)}" for name, value in facts.items()]
    if panics := recent_panics():
        found.numbers["panics"] = panics
        text = f"{FOLDER} has reports of kernel panics of the last {DAYS} days:"
        found.lines.append(f"{text} {', '.join(panics)} (docs/on-a-mac.md)")
    system = f"{device.get('device_name', 'CPU')}, {platform.platform()}"
    found.verdict = f"mlx_paged {_version('mlx-paged')}, mlx {mlx_version}, {system}"
    # A development build of mlx has a suffix after these three numbers.
    if mlx_version.split(".")[:3] != built_with["mlx"].split("."):
        found.failures.append(
            f"mlx is {mlx_version}: expected {built_with['mlx']}, with which mlx_paged was built"
        )
    if mlx_lm.__version__ not in TESTED_MLX_LM:
        expected = " or ".join(TESTED_MLX_LM)
        found.failures.append(f"mlx-lm is {mlx_lm.__version__}: expected {expected}")
    pool = ops.pool_zeros((1, 1, 8, 4), mx.float32)  # TypeError if the two ABIs differ
    mx.eval(ops.gather_blocks(pool, mx.zeros((1, 1), mx.int32), 8))


def attention_path() -> str:
    """What computes attention on the default device, and why."""
    most = max_paged_queries()
    why = f"the device is a {mx.default_device().type.name.upper()}"
    if VARIABLE in os.environ:
        why = f"{VARIABLE} is {os.environ[VARIABLE]}"
    path = f"{kernels_in_use()}, through block tables"
    gathered = "gathered blocks, MLX's attention"
    if most == 0:
        path = gathered
    elif most != ANY_NUMBER:
        path += f", for up to {most} tokens of a sequence; for more: {gathered}"
    return f"{path} ({why})"


def _text(value: Any) -> str:
    """Several values in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed: a source tree"
