"""Versions, the device and its limits, and the path that attention takes."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx
import mlx_lm

from mlx_paged import ops
from mlx_paged.attention.pool_attention import ANY_NUMBER, VARIABLE, max_paged_queries
from mlx_paged.doctor.findings import Findings
from mlx_paged.doctor.kernels import kernels_in_use
from mlx_paged.drop_in.patch import TESTED_VERSIONS
from mlx_paged.kv.memory import default_kv_memory, device_memory, memory_in_use

GB = 1e9
LIMITS = ("memory_size", "max_recommended_working_set_size", "max_buffer_length")


def check_machine(found: Findings, quick: bool) -> None:
    """versions, the device, the path of attention"""
    mlx_version: str = mx.__version__  # type: ignore[attr-defined]
    built_with, mlx_lm_version = ops.BUILT_WITH, mlx_lm.__version__
    device = mx.device_info()
    found.numbers |= {
        "mlx_paged": _version("mlx-paged"),
        "mlx": mlx_version,
        "built_with": built_with,
        "mlx_lm": mlx_lm_version,
        "mlx_lm_tested": TESTED_VERSIONS,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": dict(device),
        "kernels": kernels_in_use(),
        "max_paged_queries": max_paged_queries(),
    }
    found.lines += [
        f"mlx_paged {_version('mlx-paged')}, Python {platform.python_version()},"
        f" {platform.platform()}",
        f"mlx {mlx_version}; the module was built with mlx {built_with['mlx']},"
        f" nanobind {built_with['nanobind']}",
        f"mlx-lm {mlx_lm_version}; tested with {', '.join(TESTED_VERSIONS)}",
        f"device: {mx.default_device().type.name}, {device.get('device_name', 'unknown')}"
        f" ({device.get('architecture', platform.machine())})",
        "; ".join(_limits(device)),
        f"attention: {attention_path()}",
    ]
    # A development build of mlx has a suffix after these three numbers.
    if mlx_version.split(".")[:3] != built_with["mlx"].split("."):
        found.failures.append(
            f"mlx is {mlx_version}: expected {built_with['mlx']}, with which mlx_paged was built"
        )
    if mlx_lm_version not in TESTED_VERSIONS:
        found.failures.append(
            f"mlx-lm is {mlx_lm_version}: expected {' or '.join(TESTED_VERSIONS)}"
        )
    pool = ops.pool_zeros((1, 1, 8, 4), mx.float32)  # TypeError if the two ABIs differ
    if (
        not isinstance(pool, mx.array)
        or ops.gather_blocks(pool, mx.zeros((1, 1), mx.int32), 8).size != 32
    ):
        found.failures.append("the module and mlx.core do not share their arrays")


def attention_path() -> str:
    """What computes attention on the default device, and why."""
    most = max_paged_queries()
    why = f"the device is a {mx.default_device().type.name}"
    if VARIABLE in os.environ:
        why = f"{VARIABLE} is {os.environ[VARIABLE]}"
    paged, gathered = (
        f"{kernels_in_use()}, through block tables",
        "gathered blocks, MLX's attention",
    )
    if most == 0:
        return f"{gathered} ({why})"
    if most == ANY_NUMBER:
        return f"{paged} ({why})"
    return f"{paged}, for up to {most} tokens of a sequence; for more: {gathered} ({why})"


def _limits(device: dict[str, str | int]) -> list[str]:
    known = [
        f"{name.replace('_', ' ')} {int(device[name]) / GB:.1f} GB"
        for name in LIMITS
        if name in device
    ] or [f"memory {device_memory() / GB:.1f} GB"]
    return [
        *known,
        f"in use {memory_in_use() / GB:.1f} GB",
        f"a pool takes {default_kv_memory() / GB:.1f} GB by default",
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from a source tree"
