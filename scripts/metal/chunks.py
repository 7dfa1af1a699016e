"""Counts what a compiler makes of the kernel for chunks, beside MLX's own: writes the last section
of docs/metal-counts.md.

    python -m scripts.metal.chunks

The last line on stdout is JSON.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from mlx_paged import _ext
from tests.metal_emulator import GpuCode, gpu_code, mlx_include_dir

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metal-counts.md"
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}
HEAD_DIMS = (64, 128, 256)
OF_MLX = {64: 32, 128: 16}
"""By the head dimensions of MLX's kernel: keys of its step."""
ROWS_OF_MLX = 32
THREADS = 128
FULL_LANE = 8
"""Simdgroups that fit on a scheduler of RDNA 2 if lanes have 128 registers, as Apple's have."""
EDGE = 8
BRANCH = "if (is_spoiled) {"

TITLE = "## The kernel for chunks"
TEXT = f"""{TITLE}

`python -m scripts.metal.chunks` writes this section. It compares this package's kernel for chunks
with MLX's (`steel_attention.h` of the wheel): causal, without a mask and for whole tiles. The
counts are read from the code that clang makes for RDNA 2. MLX launches its kernel for heads of 64
and 128, not for heads of 256. All kernels have threadgroups of {THREADS} threads.

| column | what |
|---|---|
| rows, keys | query rows of a threadgroup, keys of a step |
| registers | of a lane, if the compiler takes as many as it likes |
| spills | registers that do not fit if a lane has 128 |
| in flight | bytes that a simdgroup asks for in the loop before it waits for the first |
| step | instructions of the loop in the code, without waits; a product of matrices is one |
| spoiled | further instructions of a step that has values that are NaN or infinite |
| products | products of 8x8 matrices that a simdgroup computes in a step |

A value that is NaN or infinite may reach only rows that see it. If a step has such a value, and
some of its rows do not see all keys, a short loop marks the outputs that the value reaches, and
zero takes its place. After the last step the kernel adds NaN or infinity to the marked outputs. A
branch that adds such values in the step makes the loop about 5,000 instructions longer. Then 18
registers spill at D 128 and 8 at D 256; in bfloat16 26 and 9.

`shared keys` is the same kernel, with rows of several sequences that begin with the same blocks,
one token of each. Its steps have the same barriers. For 16 sequences of 4,096 shared and 64 own
tokens the decode asks once for the keys and values that are in the pool, in groups of one or two
heads. A threadgroup has 32 rows, so it asks twice in groups of four.

| D | type | kernel | rows | keys | registers | spills | in flight | step | spoiled | products |
|--:|---|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel. `code` is what the compiler makes of it, `spills` are its registers over 128, and
    `rare` are instructions of the loop in a branch for values that are not finite."""

    head_dim: int
    dtype: str
    kernel: str
    rows: int
    keys: int
    code: GpuCode
    spills: int
    rare: int = 0

    @property
    def step(self) -> int:
        """Instructions of a step whose values are finite."""
        return int(self.code.loop_instructions) - self.rare

    def __str__(self) -> str:
        products = self.rows * self.keys * 2 * self.head_dim // EDGE**3 // (THREADS // 32)
        cells = self.head_dim, self.dtype, self.kernel, self.rows, self.keys, self.code.registers
        counts = self.spills, f"{self.code.bytes_in_flight:,}", self.step, self.rare, products
        return f"| {' | '.join(map(str, (*cells, *counts)))} |"


def ours(head_dim: int, dtype: str, shared: bool = False) -> Row:
    """The kernel as the op launches it for groups of four heads: for 64 tokens, or for keys that
    eight sequences share."""
    count, tokens, columns = (8, 1, 64) if shared else (1, 64, 16)
    q = mx.zeros((count, 4, tokens, head_dim), DTYPES[dtype])
    caches = (mx.zeros((1, 1, 16, head_dim), DTYPES[dtype]) for _ in range(2))
    tables, lens = mx.zeros((count, columns), mx.int32), mx.ones((count,), mx.int32)
    prefixes = mx.zeros((2, count), mx.int32) if shared else None
    call = _ext.metal.plan_attention(q, *caches, tables, lens, scale=1.0, shared_prefixes=prefixes)
    launch = call["launches"][0]
    assert launch["pipeline"].endswith("_23_1") == shared
    assert prod(launch["threadgroup"]) == THREADS
    rows = int(launch["kernel"].rpartition("_r")[2])
    keys = 16 if head_dim > (64 if rows > 16 else 128) else 32
    source, *others = launch["source"], launch["kernel"], THREADS, launch["constants"]
    assert BRANCH in source
    code, spills = (gpu_code(source, *others, simdgroups=n) for n in (None, FULL_LANE))
    without = gpu_code(source.replace(BRANCH, "if (false) {"), *others)
    rare = code.loop_instructions - without.loop_instructions
    name = "paged, shared keys" if shared else "paged"
    return Row(head_dim, dtype, name, rows, keys, code, spills.spilled, rare)


def of_mlx(head_dim: int, dtype: str) -> Row:
    """MLX's instance for the head dimension."""
    keys = OF_MLX[head_dim]
    arguments = f"{dtype}_t, {ROWS_OF_MLX}, {keys}, {head_dim}, {head_dim}, 4, 1, bool, float"
    directory = "mlx/backend/metal/kernels"
    source = f"""#include "{directory}/utils.h"
#include "{directory}/steel/attn/kernels/steel_attention.h"
instantiate_kernel("steel", attention, {arguments})
"""
    constants = {200: 1, 201: 1, 300: 0, 301: 1, 302: 0, 303: 0}
    call = source, "steel", THREADS, constants, [mlx_include_dir()]
    spills = gpu_code(*call, simdgroups=FULL_LANE).spilled
    return Row(head_dim, dtype, "MLX", ROWS_OF_MLX, keys, gpu_code(*call), spills)


def rows() -> Iterator[Row]:
    """In the document's order."""
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            yield ours(head_dim, dtype)
            yield ours(head_dim, dtype, shared=True)
            if head_dim in OF_MLX:
                yield of_mlx(head_dim, dtype)


def with_chunks(text: str, found: list[Row]) -> str:
    """A document with this section, which is its last one."""
    before = text.partition(TITLE)[0].rstrip("\n")
    return f"{before}\n\n{TEXT}" + "".join(f"{row}\n" for row in found)


def main() -> None:
    mx.set_default_device(mx.Device(mx.cpu))
    found = [*tqdm(rows(), disable=None)]
    DOCUMENT.write_text(with_chunks(DOCUMENT.read_text(), found))
    print(json.dumps([asdict(row) for row in found]))


if __name__ == "__main__":
    main()
