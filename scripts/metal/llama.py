"""llama.cpp's own decode kernel: counts, from its source in a folder that the user names.

The folder holds ggml-metal.metal and ggml-metal-impl.h of August 2025: ggml/src/ggml-metal of the
llama.cpp in the source distribution of llama-cpp-python 0.3.16. Nothing of them is kept here.
"""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np

from scripts.metal.launches import KV_HEADS, Launched, Row, Work, total
from tests.metal_emulator import Library, Mode, gpu_code
from tests.metal_emulator.attention_cases import FLOAT16, Case, Problem, relative_rms, to_float64
from tests.metal_emulator.launch import THREADGROUP_LIMIT

KERNEL = "kernel_flash_attn_ext_vec"
ELEMENTS = {64: 8, 128: 4, 256: 4}
"""Keys that a simdgroup takes at once in the kernel's instances, by D."""
KEYS = 32
"""Of a simdgroup's pass."""
ERROR = 5e-3
"""Relative RMS: the kernel rounds queries to half, and its exponentials are of base e."""
ROLES = {1: "q", 2: "kv", 3: "kv", 6: "out"}
_PREAMBLE = "#include <metal_stdlib>\nusing namespace metal;\n#define N_SIMDWIDTH 32\n"
_PREAMBLE += "#define __FLT_MAX__ FLT_MAX\n"


def _only(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text, re.DOTALL)
    return str(found)


class Llama:
    """The kernel's text as the emulator takes it, and the struct of its arguments."""

    def __init__(self, folder: Path) -> None:
        header = (folder / "ggml-metal-impl.h").read_text()
        source = (folder / "ggml-metal.metal").read_text()
        self.arguments = _only(r"typedef struct \{[^}]*\} ggml_metal_kargs_flash_attn_ext;", header)
        load = _only(r"template <typename type4>\nvoid dequantize_f16_t4\(.*?\n\}\n", source)
        head, body = source.split(f"kernel void {KERNEL}(")
        parameters, body = body.split(") {\n", 1)
        self.text = "\n".join(
            [
                _PREAMBLE,
                self.arguments,
                load,
                head[head.rindex("template<") :],
                f"kernel void {KERNEL}({_numbered(parameters)}) {{",
                _in_any_order(body[: body.index("\n}\n") + 3]),
                *(_instance(head_dim) for head_dim in ELEMENTS),
            ]
        )
        self.library = Library.from_source(self.text, "llama.metal", Mode.RACE)

    def pack(self, values: dict[str, float]) -> bytes:
        """The struct with these values and zeros."""
        types = {"int32_t": np.int32, "uint64_t": np.uint64, "float": np.float32}
        fields = re.findall(r"(\w+) +(\w+);", self.arguments.rsplit("}", 1)[0])
        struct = np.zeros((), np.dtype([(name, types[kind]) for kind, name in fields], align=True))
        for name, value in values.items():
            struct[name] = value
        return struct.tobytes()


def _numbered(parameters: str) -> str:
    """Metal numbers buffers in order where the source does not."""
    numbered = []
    for index, parameter in enumerate(parameters.split(",")):
        numbered.append(parameter if "[[" in parameter else f"{parameter} [[buffer({index})]]")
    return ",".join(numbered)


def _in_any_order(body: str) -> str:
    """The kernel counts on lanes that go in step, and the emulator runs them one after another: add
    barriers of simdgroups, and keep lanes from storing what others overwrite."""
    barrier = "simdgroup_barrier(mem_flags::mem_threadgroup);"
    body = re.sub(r"(if \(tiisg == 0\))", rf"{barrier} \1", body)
    return re.sub(r"(sr4\[i\] = lo)", r"if (tiisg < NL) \1", body)


def _instance(head_dim: int) -> str:
    types = "half4, half4, half4, float, float, float4, float4"
    load = "half4, 1, dequantize_f16_t4"
    name = f"{KERNEL}<{types}, {load}, {load}, {head_dim}, {head_dim}, {ELEMENTS[head_dim]}>"
    return f'template [[host_name("{KERNEL}_{head_dim}")]] [[kernel]] decltype({name}) {name};'


def memory(head_dim: int, simdgroups: int) -> int:
    """Bytes of a threadgroup's memory, by llama.cpp's host code."""
    padded = -(-head_dim // 128) * 128
    return 2 * (padded + 4 * KEYS * simdgroups + 2 * head_dim * simdgroups)


def simdgroups(head_dim: int, keys: int) -> int:
    """Of a threadgroup, by llama.cpp's host code."""
    wanted = max(2, min(32, keys // KEYS))
    powers = (1 << power for power in range(6))
    return max(n for n in powers if n <= wanted and memory(head_dim, n) <= THREADGROUP_LIMIT)


def llama_row(llama: Llama, work: Work) -> Row:
    """The kernel on contiguous keys and values of one sequence."""
    (keys,) = work.contexts
    dim, heads = work.head_dim, work.group
    problem = Problem(Case(FLOAT16, 1, heads, 1, 1, keys, dim))
    q = np.array(problem.q.astype(mx.float32))
    out = np.full(q.shape, np.nan, np.float32)
    sizes = {"ne01": 1, "ne02": heads, "ne03": 1, "ne11": keys, "ne_12_2": 1, "ne_12_3": 1}
    strides = {"nb01": 4 * dim, "nb02": 4 * dim, "nb11": 2 * dim, "nb21": 2 * dim}
    others = {"ne32": 1, "ne33": 1, "ne1": heads, "ne2": 1, "scale": problem.scale}
    each = simdgroups(dim, keys)
    result = llama.library.launch(
        f"{KERNEL}_{dim}",
        grid=(1, heads, 1),
        threadgroup=(32, each, 1),
        buffers={
            **{0: llama.pack({**sizes, **strides, **others}), 1: q, 4: q, 5: q, 6: out},
            **{2: np.array(problem.k), 3: np.array(problem.v)},
        },
        threadgroup_bytes={0: memory(dim, each)},
        check=False,
    )
    assert relative_rms(to_float64(out), problem.in_float64()) < ERROR
    stats = result.stats
    return Row(
        work=work,
        kernel="llama.cpp, vec",
        sizes=(),
        launches=1,
        threadgroups=stats.threadgroups * KV_HEADS,
        threads=32 * each,
        threadgroup_bytes=stats.threadgroup_bytes,
        code=gpu_code(llama.text, f"{KERNEL}_{dim}", 32 * each, {}),
        counts=total(work, [Launched(stats, ROLES)]),
    )
