"""What MLX's gather is given by ``gather_blocks``: on a GPU its kernel depends on it."""

import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.metal_emulator import require_emulator
from tests.metal_emulator.cache import cached
from tests.metal_emulator.mlx_headers import mlx_include_dir
from tests.metal_emulator.toolchain import clang

ROOT = Path(__file__).parents[2]
SOURCES = [Path(__file__).with_name("gather_call.cpp"), ROOT / "csrc/pool_reads.cpp"]
INT32_MAX = 2**31 - 1


@dataclass
class Input:
    shape: list[int]
    strides: list[int]
    is_row_contiguous: bool
    size: int


@dataclass
class Call:
    """A gather: how many elements it takes at an index, its source and its indices."""

    taken: int
    source: Input
    indices: list[Input]


@cache
def _program() -> Path:
    require_emulator()
    include = mlx_include_dir()
    library = include.parent / "lib"
    arguments = ["-std=c++20", f"-I{ROOT}", f"-I{include}", str(SOURCES[0])]
    arguments += [f"-L{library}", "-lmlx", f"-Wl,-rpath,{library}"]
    texts = [path.read_text() for path in [*SOURCES, *sorted((ROOT / "csrc").rglob("*.h"))]]

    def make(path: Path) -> None:
        clang(*arguments, "-o", str(path))

    return cached(".gather", [mx.__version__, *arguments, *texts], make)


def call_of(shape: tuple[int, ...], strides: tuple[int, ...], batch: int = 1, columns: int = 3):
    """The gather from a cache ``[H, N, S, D]``. No array has memory."""
    words = " ".join(map(str, [*shape, *strides, batch, columns]))
    found = subprocess.run([_program()], input=words, text=True, check=True, capture_output=True)
    taken, *inputs = found.stdout.split("|")
    read = []
    for text in inputs:
        lengths, steps, flag, size = text.split(";")
        numbers = [int(word) for word in lengths.strip(" ()").split(",")]
        read.append(Input(numbers, [*map(int, steps.split())], flag.strip() == "1", int(size)))
    return Call(int(taken), read[0], read[1:])


def has_quick_kernel(call: Call) -> bool:
    """The condition in MLX's backend/metal/indexing.cpp, ``Gather::eval_gpu``, for a gather along
    the first axis: neighbouring threads then read neighbouring elements."""
    source, indices = call.source, call.indices
    is_quick = source.is_row_contiguous and len(indices) == 1 and indices[0].is_row_contiguous
    return is_quick and call.taken == source.strides[0]


def has_wide_offsets(call: Call) -> bool:
    return max(call.source.size, call.indices[0].size, call.taken) > INT32_MAX


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(("heads", "block_size", "dim"), [(8, 16, 128), (1, 16, 576), (2, 4, 5)])
def test_a_pools_blocks_are_rows_of_one_matrix(heads, block_size, dim, batch):
    run = block_size * dim
    call = call_of((heads, 100, block_size, dim), (run, heads * run, dim, 1), batch)
    assert has_quick_kernel(call)
    assert call.source.shape == [100 * heads, run] and call.taken == run
    assert call.indices[0].shape == [batch, heads, 3]


def test_an_axis_of_length_one_may_have_any_stride():
    assert has_quick_kernel(call_of((1, 100, 16, 64), (100 * 16 * 64, 16 * 64, 64, 1)))
    assert has_quick_kernel(call_of((2, 1, 16, 64), (16 * 64, 7, 64, 1)))


@pytest.mark.parametrize(
    "strides",
    [(100 * 64, 64, 8, 1), (64, 128, 8, 2), (72, 144, 9, 1), (64, 192, 8, 1)],
    ids=["heads first", "every other column", "some columns", "some heads"],
)
def test_of_other_arrays_the_gather_knows_head_and_block(strides):
    call = call_of((2, 100, 8, 8), strides)
    assert not has_quick_kernel(call)
    assert call.source.strides == [*strides] and call.taken == 64
    assert [index.shape for index in call.indices] == [[1, 2, 3]] * 2


LATENT, ROTARY, BLOCK = 512, 64, 16


@pytest.mark.parametrize(
    ("blocks", "columns", "is_wide"),
    [
        (INT32_MAX // (BLOCK * (LATENT + ROTARY)), ROTARY, False),
        (INT32_MAX // (BLOCK * (LATENT + ROTARY)) + 2, ROTARY, True),
        (INT32_MAX // (BLOCK * (LATENT + ROTARY)) + 2, LATENT + ROTARY, True),
        (2**30 // (BLOCK * (LATENT + ROTARY)), LATENT, False),
    ],
)
def test_offsets_have_64_bits_where_the_memory_needs_them(blocks, columns, is_wide):
    """MLX asks how many elements the source has, which of some columns is less than they reach."""
    row = LATENT + ROTARY
    call = call_of((1, blocks, BLOCK, columns), (BLOCK * row, BLOCK * row, row, 1))
    assert has_wide_offsets(call) is is_wide
    reach = (blocks - 1) * BLOCK * row + (BLOCK - 1) * row + columns
    assert call.source.size >= min(reach, np.prod((blocks, BLOCK, columns), dtype=np.int64))


def test_a_far_block_has_64_bits():
    """Two blocks of two slots, the second one far away."""
    call = call_of((1, 2, 2, 64), (64, 2**31, 64, 1))
    assert has_wide_offsets(call)
