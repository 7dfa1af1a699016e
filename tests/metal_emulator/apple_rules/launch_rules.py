"""What MLX's encoder gets for a source: names, function constants, arguments."""

import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from .. import toolchain
from ..language.opencl import to_opencl
from ..language.translation import KernelSignature, translate
from ..preprocess import preprocess
from ..typecheck import OPENCL_FLAGS
from .source import Finding, split_instantiation

Launch = dict[str, Any]
Call = dict[str, Any]
"""As `mlx_paged._ext.metal` describes them."""

Found = Iterator[tuple[str, str]]

_WORD = re.compile(r"[A-Za-z0-9_]+")
_MOST_BYTES = 4096
"""Of `set_bytes`."""

_signatures: dict[str, KernelSignature] = {}


def names(launch: Launch, call: Call) -> Found:
    for name in ("kernel", "pipeline", "library"):
        if not _WORD.fullmatch(launch[name]):
            yield launch["kernel"], f"the {name} {launch[name]} is not of letters, digits and _"


def constants(launch: Launch, call: Call) -> Found:
    """All that the kernel can reach are set, with values of their types, and no others."""
    signature = _signature(launch)
    reached = {constant.index: constant for constant in signature.constants}
    for index in sorted(reached.keys() - launch["constants"].keys()):
        yield launch["kernel"], f"function constant {reached[index].name} ({index}) is not set"
    for index, value in launch["constants"].items():
        if index not in reached:
            yield launch["kernel"], f"function constant {index} is set, the kernel has none"
        elif type(value).__name__ != reached[index].type:
            expected = f"expected {reached[index].type}"
            yield launch["kernel"], f"function constant {index} is {value!r}: {expected}"


def parameter_struct(launch: Launch, call: Call) -> Found:
    index, params = launch["params"]
    if len(params) > _MOST_BYTES:
        yield launch["kernel"], f"{len(params)} bytes of parameters: the most is {_MOST_BYTES}"
    for parameter in _signature(launch).parameters:
        if parameter.kind == "buffer" and int(parameter.index) == index:
            name = next(w for w in parameter.words if w not in ("const", "constant", "&", "*"))
            if not _has_size(_template(launch["source"]), name, len(params)):
                message = f"{name} is not {len(params)} bytes in Metal, as it is on the host"
                yield launch["kernel"], message


def bound_bytes(launch: Launch, call: Call) -> Found:
    """Metal binds no buffer that holds nothing."""
    for index, role, which in launch["buffers"]:
        if _num_bytes(call, role, which) == 0:
            yield launch["kernel"], f"buffer {index} is bound to 0 bytes"
    index, params = launch["params"]
    if not params:
        yield launch["kernel"], f"buffer {index} is bound to 0 bytes"


LAUNCH_RULES: dict[str, Callable[[Launch, Call], Found]] = {
    "launch-name": names,
    "launch-constants": constants,
    "parameter-struct": parameter_struct,
    "zero-bytes": bound_bytes,
}


def check_call(call: Call) -> list[Finding]:
    """What of the launches of one op breaks a rule."""
    return sorted(
        {
            Finding(place, rule, message)
            for launch in call["launches"]
            for rule, find in LAUNCH_RULES.items()
            for place, message in find(launch, call)
        }
    )


def _num_bytes(call: Call, role: str, which: int) -> int:
    if role == "scratch":
        return int(call["scratch_bytes"][which])
    if role in ("output", "pool_write"):
        output = call["outputs"][which]
        if not isinstance(output, int):
            shape, dtype = output
            return math.prod(shape) * int(dtype.size)
        which = output
    return int(call["inputs"][which].nbytes)


def _signature(launch: Launch) -> KernelSignature:
    """Arguments and function constants: those of the template, for all its instances."""
    template = _template(launch["source"])
    if template not in _signatures:
        translation = translate(preprocess(launch["source"], "launch.metal", []))
        _signatures[template] = translation.kernels[launch["kernel"]]
    return _signatures[template]


@lru_cache(maxsize=512)
def _template(source: str) -> str:
    return split_instantiation(source)[0]


@lru_cache(maxsize=512)
def _has_size(template: str, struct: str, num_bytes: int) -> bool:
    text = to_opencl(preprocess(template, "launch.metal", []))
    text += f'\nstatic_assert(sizeof({struct}) == {num_bytes}, "");\n'
    try:
        toolchain.clang(*OPENCL_FLAGS, "-w", "-", source=text)
    except toolchain.CompileError:
        return False
    return True
