"""Launches that Metal would refuse, or that bind nonsense, are ValueErrors that say why."""

import functools
from typing import Any

import numpy as np
import pytest

from .findings import EmulatorFinding, FindingKind
from .library import Library
from .modes import Mode

SOURCE = """
#include <metal_stdlib>
using namespace metal;
constant int factor [[function_constant(4)]];
constant uchar small [[function_constant(5)]];
constant bool unused [[function_constant(6)]];
inline int scaled(int x) { return x * factor; }
kernel void scale(device int* values [[buffer(0)]], constant int& offset [[buffer(2)]],
                  threadgroup int* shared [[threadgroup(1)]],
                  uint i [[thread_position_in_grid]]) {
  shared[i] = scaled(values[i]);
  values[i] = shared[i] + offset + small;
}
kernel void nothing() {}
"""
DEFAULTS: dict[str, Any] = {
    "kernel": "scale",
    "grid": (1, 1, 1),
    "threadgroup": (4, 1, 1),
    "threadgroup_bytes": {1: 16},
    "constants": {4: 10, 5: 1},
}


@functools.cache
def library(mode: Mode = Mode.FAST) -> Library:
    return Library.from_source(SOURCE, "scale.metal", mode)


def run(mode: Mode = Mode.FAST, **options: Any) -> list[int]:
    values = np.arange(4, dtype=np.int32)
    arguments = {**DEFAULTS, "buffers": {0: values, 2: np.int32(100)}, **options}
    library(mode).launch(arguments.pop("kernel"), **arguments)
    return list(values.tolist())


def test_right_launch() -> None:
    assert run() == [101, 111, 121, 131]
    assert run(constants={4: -1, 5: 0}) == [100, 99, 98, 97]
    assert run() == [101, 111, 121, 131]


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_bytes_as_buffers(make: Any) -> None:
    values = np.arange(4, dtype=np.int32)
    run(buffers={0: values, 2: make(b"\x64\0\0\0")})
    assert values.tolist() == [101, 111, 121, 131]


def test_kernel_without_buffers() -> None:
    library().launch("nothing", grid=(1, 1, 1), threadgroup=(1, 1, 1), buffers={})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "scales"}, "no kernel scales: there are scale, nothing"),
        ({"grid": (0, 1, 1)}, r"grid is \(0, 1, 1\)"),
        ({"threadgroup": (1, 1)}, r"threadgroup is \(1, 1\)"),
        ({"threadgroup": (32, 33, 1)}, "1056 threads per threadgroup, the limit is 1024"),
        ({"constants": {4: 10}}, r"function constant 5 \(small\) is not given"),
        ({"constants": {4: 10, 5: 256}}, r"function constant 5 \(small\) is 256"),
        ({"constants": {4: 1.5, 5: 1}}, r"function constant 4 \(factor\) is 1.5"),
        ({"threadgroup_bytes": {}}, "threadgroup memory 1 has 0 bytes"),
        ({"threadgroup_bytes": {1: 20}}, "threadgroup memory 1 has 20 bytes"),
        ({"threadgroup_bytes": {0: 16, 1: 16}}, "has no threadgroup memory 0"),
        ({"buffers": {1: np.zeros(4)}}, r"has no buffer 1: it has \[0, 2\]"),
        ({"buffers": {0: np.zeros((4, 4))[:, 0]}}, "buffer 0 is not contiguous"),
        ({"buffers": {0: [1, 2, 3]}}, "buffer 0 is a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_launch(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"\[launch\] .*{message}"):
        run(**options)


def test_store_just_past_the_end() -> None:
    """Too close for guard pages, which begin at a multiple of 16 bytes; FAST sees it afterwards."""
    values = np.zeros(3, np.int32)
    with pytest.raises(EmulatorFinding) as raised:
        run(buffers={0: values, 2: np.int32(0)})
    assert [f.kind for f in raised.value.findings] == [FindingKind.OUT_OF_BOUNDS]
    assert "buffer 0, which has 12 bytes" in raised.value.findings[0].detail


def test_overlapping_buffers() -> None:
    values = np.arange(5, dtype=np.int32)
    with pytest.raises(ValueError, match="buffers 0 and 2 overlap in part"):
        run(buffers={0: values[:4], 2: values[1:]})


def test_columns_of_one_array() -> None:
    source = """
    kernel void swap(device int* all [[buffer(0)]], device int* right [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
      const int value = all[4 * i];
      all[4 * i] = right[4 * i];
      right[4 * i] = value;
    }
    """
    values = np.arange(16, dtype=np.int32)
    Library.from_source(source, "swap.metal").launch(
        "swap",
        grid=(4, 1, 1),
        threadgroup=(4, 1, 1),
        buffers={0: values, 1: values[3:]},
        grid_in_threads=True,
    )
    swapped = np.arange(16).reshape(4, 4)[:, [3, 1, 2, 0]]
    np.testing.assert_array_equal(values.reshape(4, 4), swapped)


def test_only_some_kernels() -> None:
    assert Library.from_source(SOURCE, "scale.metal", only=["nothing"]).kernels == ["nothing"]
    with pytest.raises(ValueError, match=r"scale\.metal has no kernel some"):
        Library.from_source(SOURCE, "scale.metal", only=["some"])


def test_same_seed_same_order() -> None:
    source = """
    kernel void order(device metal::atomic_int* next [[buffer(0)]], device int* out [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
      out[metal::atomic_fetch_add_explicit(next, 1, metal::memory_order_relaxed)] = i;
    }
    """
    orders = {}
    for seed in (None, 1, 2):
        for repetition in range(2):
            out = np.zeros(256, np.int32)
            Library.from_source(source, "order.metal").launch(
                "order",
                grid=(4, 1, 1),
                threadgroup=(64, 1, 1),
                buffers={0: np.zeros(1, np.int32), 1: out},
                seed=seed,
            )
            orders[seed, repetition] = out.tolist()
            assert sorted(out) == list(range(256))
    assert orders[None, 0] == list(range(256))
    assert all(orders[seed, 0] == orders[seed, 1] for seed in (None, 1, 2))
    assert len({tuple(order) for order in orders.values()}) == 3
