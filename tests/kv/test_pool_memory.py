"""Where the pool lies: from a page's start, on huge pages where Linux gives them."""

import mmap
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv.shapes import KVShape

PAGE, HUGE = 2**12, 2**21
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

on_huge_pages = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(),
    reason="this kernel gives no transparent huge pages",
)


@pytest.fixture(autouse=True)
def on_cpu():
    with mx.stream(mx.cpu):
        yield


def address(array: mx.array) -> int:
    flat = array if array.ndim < 4 else array.transpose(1, 0, 2, 3)
    return np.array(flat, copy=False).ctypes.data


def whole_huge_pages(array: mx.array) -> range:
    begin, end = address(array), address(array) + array.nbytes
    return range(-(-begin // HUGE) * HUGE, end // HUGE * HUGE, HUGE)


def mapping_of(page: int) -> str:
    """What /proc/self/smaps says of the mapping that holds an address."""
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    for entry in filter(None, entries):
        first, last = (int(end, 16) for end in entry.split(maxsplit=1)[0].split("-"))
        if first <= page < last:
            return entry
    raise AssertionError(f"{page:x} is not mapped")


def is_advised(page: int) -> bool:
    return "hg" in re.findall(r"VmFlags:(.*)", mapping_of(page))[0].split()


def pool(num_blocks: int) -> KVPool:
    return KVPool([KVShape(2, 64, 64, mx.float32)], num_blocks, 16)  # blocks of 8 KiB


@on_huge_pages
def test_every_whole_huge_page_of_a_pool_is_advised():
    made = pool(1000)
    for array in (made.k[0], made.v[0]):
        pages = whole_huge_pages(array)
        assert len(pages) >= 2
        assert all(is_advised(page) for page in pages)


def check_that_the_ends_are_not_advised() -> None:
    made = pool(1000)
    for array in (made.k[0], made.v[0]):
        pages, begin, end = whole_huge_pages(array), address(array), address(array) + array.nbytes
        ends = [p for p in (pages.start - PAGE, pages.stop) if begin <= p < end]
        assert ends and not any(is_advised(page) for page in ends)


@pytest.mark.slow
@on_huge_pages
def test_the_ends_of_an_array_are_not():
    """A huge page there would hold memory of others, or take more than the array has. In a process
    of its own, where nobody had memory of another array advised before."""
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        alone.submit(check_that_the_ends_are_not_advised).result()


@on_huge_pages
def test_a_pool_that_grew_is_advised_and_keeps_its_content():
    growing = pool(100)
    rows = mx.random.normal((32, 2, 64))
    growing.write(0, rows, rows, mx.arange(32, dtype=mx.int32))
    growing.grow(1000)
    assert all(is_advised(page) for page in whole_huge_pages(growing.k[0]))
    k, _ = growing.gather(0, mx.arange(1000, dtype=mx.int32)[None], 16000)
    assert mx.array_equal(k[0, :, :32], rows.transpose(1, 0, 2))
    assert not k[0, :, 32:].any()


@pytest.mark.parametrize("grows", [False, True])
def test_arrays_begin_on_a_page(grows):
    made = pool(100)
    if grows:
        made.grow(150)
    assert [address(array) % PAGE for array in (made.k[0], made.v[0])] == [0, 0]


def test_it_takes_the_memory_of_plain_zeros():
    shape, before = (1000, 2, 16, 64), mx.get_active_memory()
    plain = mx.zeros(shape)
    mx.eval(plain)
    of_plain = mx.get_active_memory() - before
    zeros = _ext.pool_zeros(shape, mx.float32)
    mx.eval(zeros)
    assert mx.get_active_memory() - before <= 2 * of_plain + max(PAGE, mmap.PAGESIZE)
    assert zeros.dtype == mx.float32 and mx.array_equal(zeros, plain)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 4), (), (5,)], ids=str)
def test_any_shape_is_zeros(shape):
    zeros = _ext.pool_zeros(shape, mx.bfloat16)
    assert zeros.shape == shape and mx.array_equal(zeros, mx.zeros(shape, mx.bfloat16))
