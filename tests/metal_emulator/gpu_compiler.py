"""What a GPU's compiler makes of a kernel: clang's code for AMD's RDNA 2 with 32 lanes.

It is not Apple's compiler. It answers the same questions for every kernel: how many registers a
lane needs, how many bytes it asks for before it waits, and which loads wait for other loads.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import toolchain
from .build import generated_headers
from .language.translation import translate
from .launch import Constant, check_constants
from .llvm_text import dependent_loads
from .preprocess import preprocess

LANES = 32
_HEADER = Path(__file__).parent / "gpu" / "metal.h"
_FLAGS = (
    *("-target", "amdgcn-amd-amdhsa", "-mcpu=gfx1030", "-nogpulib", "-O2"),
    *("-Wno-everything", "-S", "-o", "-"),
)
_CXX = (
    *("-x", "c++", "-std=c++17", "-fdeclspec", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-fdenormal-fp-math=preserve-sign", "-ffp-contract=fast"),
    # A pass of a loop stays one pass.
    *("-mllvm", "-unroll-runtime=false"),
    *("-Xclang", "-fconvergent-functions"),
)
_AS_IT_IS = ("-Xclang", "-disable-llvm-passes")
_LOAD = re.compile(r"\s(?:global|flat|buffer)_load_(\w+)")
_SIZES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "sbyte": 1}
_SIZE_OF_SHORT = 2
_WAIT = re.compile(r"\ss_waitcnt .*vmcnt\((\d+)\)")
_LABEL = re.compile(r"(?:\.LBB|; %bb\.)\d")
_LOOP = re.compile(r"(?:in|This|This Inner) Loop")
_OUTERMOST_HEADER = re.compile(r"Loop Header: Depth=1\b")
_INSTRUCTION = re.compile(
    r"\t(?!s_waitcnt|s_nop|s_clause|buffer_gl\d_inv)(?:[a-z]+_\w+|; (?:simdgroup|matrix) \w+)\b"
)


@dataclass(frozen=True, slots=True)
class GpuCode:
    """Of one kernel with its function constants.

    Attributes:
        registers: vector registers of a lane, 4 bytes each.
        spilled: those of them that did not fit.
        bytes_in_flight: the most that a simdgroup has asked for in a loop and not yet waited for.
        dependent_loads: the longest chain of loads from device memory in one pass of a loop, each
            of which needs what the one before it has loaded.
        loop_instructions: of the longest loop in the code, with all of its branches and without
            waits; what one lane tells another and a product of matrices are one each.
    """

    registers: int
    spilled: int
    bytes_in_flight: int
    dependent_loads: int
    loop_instructions: int


def gpu_code(
    source: str,
    kernel: str,
    threads: int,
    constants: Mapping[int, Constant],
    include_dirs: Sequence[Path] = (),
    simdgroups: int | None = None,
) -> GpuCode:
    """Compile one kernel of Metal `source` for threadgroups of so many threads and look at it.

    `simdgroups` have to fit on a scheduler, so that clang takes no more registers than that allows.
    By default it takes as many as help it to ask for loads early.
    """
    text = preprocess(source, f"{kernel}.metal", include_dirs)
    translation = translate(text, frozenset([kernel]))
    check_constants(translation.kernels[kernel], constants)
    code = _constants(constants) + translation.code
    headers = ("-include", str(_HEADER), f"-I{generated_headers()}")
    intermediate = toolchain.clang(*_FLAGS, *_CXX, *headers, "-emit-llvm", "-", source=code)
    limited = _limited(intermediate, threads, simdgroups)
    assembly = toolchain.clang(*_FLAGS, "-x", "ir", *_AS_IT_IS, "-", source=limited)
    return GpuCode(
        registers=_number("vgpr_count", assembly),
        spilled=_number("vgpr_spill_count", assembly),
        bytes_in_flight=LANES * _bytes_in_flight(assembly),
        dependent_loads=dependent_loads(intermediate),
        loop_instructions=_loop_instructions(assembly),
    )


def _constants(constants: Mapping[int, Constant]) -> str:
    """The function constants as constants of C++."""
    cases = " ".join(f"case {i}: return T({float(value)!r});" for i, value in constants.items())
    function = f"constexpr T function_constant(int id) {{ switch (id) {{ {cases} }} return T(0); }}"
    return f"namespace emulator {{ template <class T> {function} }}\n"


def _limited(intermediate: str, threads: int, simdgroups: int | None) -> str:
    """LLVM's text, with the size of a threadgroup as an attribute of its functions."""
    limits = f'"amdgpu-flat-work-group-size"="{threads},{threads}"'
    if simdgroups is not None:
        limits += f' "amdgpu-waves-per-eu"="{simdgroups},{simdgroups}"'
    return re.sub(r"^(attributes #\d+ = \{)", rf"\1 {limits}", intermediate, flags=re.MULTILINE)


def _number(name: str, assembly: str) -> int:
    (number,) = re.findall(rf"^ +\.{name}: +(\d+)$", assembly, re.MULTILINE)
    return int(number)


def _bytes_in_flight(assembly: str) -> int:
    """Of one lane, in any loop. What a loop leaves under way is there when it begins anew."""
    most = 0
    for loop in _loops(assembly.splitlines()):
        under_way: list[int] = []
        for line in loop * 2:
            if load := _LOAD.search(line):
                under_way.append(_SIZES.get(load[1], _SIZE_OF_SHORT))
            elif wait := _WAIT.search(line):
                under_way = under_way[max(0, len(under_way) - int(wait[1])) :]
            most = max(most, sum(under_way))
    return most


def _loop_instructions(assembly: str) -> int:
    loops = _loops(assembly.splitlines())
    return max((sum(map(bool, map(_INSTRUCTION.match, loop))) for loop in loops), default=0)


def _loops(lines: Sequence[str]) -> list[list[str]]:
    """The lines of each outermost loop, by the comments that clang writes at labels."""
    loops: list[list[str]] = []
    inside = False
    for line in lines:
        if _LABEL.match(line):
            inside = False
        if _LOOP.search(line):
            if not inside and (_OUTERMOST_HEADER.search(line) or not loops):
                loops.append([])
            inside = True
        if inside:
            loops[-1].append(line)
    return loops
