"""Writes the Metal sources that the extension hands to MLX, for a compiler to try at once.

    python -m scripts.metal.sources DIR

Each file is named after the kernel that it instantiates. The set has every kernel in each dtype,
for some widths of heads and numbers of query rows. Prints what was written as one JSON line.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged import _ext, ops
from mlx_paged.ops.formats import FORMATS, Format

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
HEADS = ((64, 64, 1), (128, 128, 2), (128, 128, 4), (128, 128, 8), (256, 256, 2), (576, 512, 16))
"""Dimensions of keys and of values, and query heads that share a KV head."""

BLOCK_SIZE = 16
NUM_COLUMNS = 64
"""Of a block table that is long enough for its context to be split."""

Launch = dict[str, Any]
"""As ``_ext.metal`` describes it."""


def attention_launches(dtype: mx.Dtype, dim: int, v_dim: int, group: int) -> list[Launch]:
    """Attention over a split context, and the merge of its splits."""
    k_cache = mx.zeros((1, 1, BLOCK_SIZE, dim), dtype)
    call = _ext.metal.plan_attention(
        mx.zeros((1, group, 1, dim), dtype),
        k_cache,
        k_cache[..., :v_dim] if v_dim < dim else mx.zeros((1, 1, BLOCK_SIZE, v_dim), dtype),
        mx.zeros((1, NUM_COLUMNS), mx.int32),
        mx.ones((1,), mx.int32),
        scale=1.0,
    )
    return list(call["launches"])


def shared_launches(dtype: mx.Dtype) -> list[Launch]:
    """Attention of sequences that begin with the same blocks."""
    found = []
    for count, dim, group in ((2, 64, 1), (8, 128, 4), (4, 256, 4)):
        call = _ext.metal.plan_attention(
            mx.zeros((count, group, 1, dim), dtype),
            *(mx.zeros((1, 1, BLOCK_SIZE, dim), dtype) for _ in range(2)),
            mx.zeros((count, NUM_COLUMNS), mx.int32),
            mx.ones((count,), mx.int32),
            scale=1.0,
            shared_prefixes=mx.zeros((2, count), mx.int32),
        )
        found += call["launches"]
    return found


def pool_launches(dtype: mx.Dtype) -> list[Launch]:
    """A write of rows and a copy of a block."""
    k_cache, v_cache = (mx.zeros((1, 2, BLOCK_SIZE, 64), dtype) for _ in range(2))
    rows = mx.zeros((1, 1, 64), dtype)
    calls = (
        _ext.metal.plan_write_kv(rows, rows, k_cache, v_cache, mx.zeros((1,), mx.int32)),
        _ext.metal.plan_copy_blocks(k_cache, v_cache, mx.zeros((1, 2), mx.int32)),
    )
    return [launch for call in calls for launch in call["launches"]]


def quantized_launches(dtype: mx.Dtype, keys: Format, values: Format) -> list[Launch]:
    """A write to a quantized pool, and attention of a decode and of a chunk over one."""
    dim = 128
    forms, slots = (keys, values), (1, 2, BLOCK_SIZE)
    k_cache, v_cache = (mx.zeros((*slots, form.columns(dim)), form.dtype) for form in forms)
    k_scales, v_scales = (mx.zeros((*slots, f.scale_columns(dim)), mx.float16) for f in forms)
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    rows, where = mx.zeros((1, 1, dim), dtype), mx.zeros((1,), mx.int32)
    calls = [
        _ext.metal.plan_write_kv(rows, rows, k_cache, v_cache, where, **scales),
        _ext.metal.plan_write_kv(k_cache[0, :1, :1], v_cache[0, :1, :1], k_cache, v_cache, where),
        _ext.metal.plan_copy_blocks(k_cache, v_cache, mx.zeros((1, 2), mx.int32)),
    ]
    for tokens in (1, 8):
        q, tables = mx.zeros((1, 1, tokens, dim), dtype), mx.zeros((1, 2), mx.int32)
        arrays = q, k_cache, v_cache, tables, mx.ones((1,), mx.int32)
        calls.append(_ext.metal.plan_attention(*arrays, scale=1.0, **scales))
    return [launch for call in calls for launch in call["launches"]]


def launches() -> Iterator[Launch]:
    """The launches whose sources are written: of calls in the form that is wanted, and in the
    simplest one."""
    yield from _launches()
    with ops.in_simplest_forms():
        simplest = list(_launches())
    yield from simplest


def _launches() -> Iterator[Launch]:
    for dtype in DTYPES:
        for heads in HEADS:
            yield from attention_launches(dtype, *heads)
        yield from shared_launches(dtype)
        yield from pool_launches(dtype)
        for forms in FORMATS.values():
            yield from quantized_launches(dtype, *forms)


def write_sources(directory: Path) -> list[Path]:
    """Write the source of each launch to ``KERNEL.metal``; returns the files, sorted."""
    directory.mkdir(parents=True, exist_ok=True)
    sources = {directory / f"{launch['kernel']}.metal": launch["source"] for launch in launches()}
    for path, source in sources.items():
        path.write_text(source, encoding="ascii")
    return sorted(sources)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts.metal.sources", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    mx.set_default_device(mx.Device(mx.cpu))
    print(json.dumps([str(path) for path in write_sources(parser.parse_args().directory)]))


if __name__ == "__main__":
    main()
