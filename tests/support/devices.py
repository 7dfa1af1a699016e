"""The device of a test: a Mac's GPU for tests that are marked ``mac``, the CPU for all others."""

import sys

import mlx.core as mx

CPU_SUMS = 3e-6
"""Relative error that float32 accumulation over thousands of keys may leave in one row."""

GPU_SUMS = 32 * 2.0**-23
"""The same on a GPU, whose fast exponential and sums in another order leave some units more."""

ROUNDOFF = {mx.float32: 0.0, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
"""By output dtype: half its eps. Float32 has its own as a part of the sums."""

MLX_ROUNDS = 4
"""How many such roundings plain MLX makes on a GPU, where weights have the type of queries, too."""

LACKING = ("[METAL]", "[metal::", "Unable to load kernel", "Unable to build", "[Metal]")
"""How errors begin that say that a device has no such kernel, buffer or queue."""


def device_of_test(is_marked: bool, system: str = sys.platform) -> mx.Device | None:
    """The default device of a test. None: it stays as it is. Only a Mac has two."""
    if system != "darwin":
        return None
    return mx.Device(mx.gpu if is_marked and mx.is_available(mx.gpu) else mx.cpu)


def is_gpu() -> bool:
    """Whether the default device is a GPU."""
    return mx.default_device() == mx.Device(mx.gpu)


def tolerance(dtype: mx.Dtype, kernel: str = "native") -> float:
    """Largest relative error of a right row of attention on the default device, by the `dtype` of
    the output and the `kernel` that answers: "native", or "reference" for plain MLX."""
    if not is_gpu():
        return ROUNDOFF[dtype] + CPU_SUMS
    return (ROUNDOFF[dtype] + GPU_SUMS) * (MLX_ROUNDS if kernel == "reference" else 1)


def what_lacks(error: BaseException, device_name: str) -> str | None:
    """Why a test cannot run on a device: what a paravirtual GPU, as hosted Macs have, says that it
    has not. None: the error is one. A wrong number is always an error, and so is each on a GPU that
    is not paravirtual."""
    text = str(error).partition("\n")[0]
    if "paravirtual" not in device_name.lower() or not isinstance(error, RuntimeError):
        return None
    return f"{device_name}: {text}" if text.startswith(LACKING) else None
