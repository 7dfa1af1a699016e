"""Bytes of keys and values that the Metal kernels load, as the emulator counts them."""

import mlx.core as mx
import numpy as np
import pytest

from tests.metal_emulator import Mode, UniqueBytes
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.paged_cases import TOLERANCE, Case, latent_case, random_case, worst_error

KV_HEADS = 2
TILE = 32
"""Keys that the tile kernel takes at once."""

BATCHES = {"split": [4096, 1, 513], "whole": [512, 1, 45]}
"""Context lengths."""

CACHES = {"keys": 1, "values": 2}
"""Buffer indices of the attention kernel."""


@pytest.fixture(params=BATCHES)
def contexts(request) -> list[int]:
    return BATCHES[request.param]


def loaded_bytes(case: Case) -> list[tuple[int, UniqueBytes]]:
    """For the keys and for the values what all lanes load, and the same without repetition.

    The output has to be right, and more than 512 keys that a sequence sees are split.
    """
    metal = MetalRunner(Mode.RACE)
    q, k_cache, v_cache, tables, lens = case.arrays
    out = metal.paged_attention(q, [k_cache], [v_cache], tables, lens, **case.options)
    kernels = [name.split("_half")[0] for name in metal.trace.kernels]
    visible = min(
        tables.shape[1] * case.block_size, case.options.get("window", 1 << 30) + q.shape[2] - 1
    )
    splits = ["merge_splits"] if visible > 512 else []
    rows = q.shape[1] // k_cache.shape[0] * q.shape[2]
    # Single tokens of groups of up to eight heads take the decode kernel over few keys.
    most = 8 if q.shape[2] == 1 and visible <= 512 else 4
    assert kernels == ["matrix_attention" if rows > most else "paged_attention", *splits]
    assert worst_error(out, case.expected()[0]) < TOLERANCE[mx.float16]
    stats = metal.trace.stats[0]
    return [(stats.loaded_bytes[i], stats.unique_loaded_bytes[i]) for i in CACHES.values()]


def keys_in_tiles(contexts: list[int], seen: list[int]) -> int:
    """Keys of the tiles in which the last `seen` keys of each context are."""
    pairs = zip(contexts, seen, strict=True)
    return sum(-(-n // TILE) * TILE - (n - keys) // TILE * TILE for n, keys in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "head_dim"),
    [(1, 128), (2, 128), (3, 128), (4, 128), (4, 64), (8, 128), (8, 64)],
)
def test_each_live_byte_is_loaded_once(contexts, group, head_dim):
    case = random_case(
        contexts,
        num_heads=KV_HEADS * group,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        dtype=mx.float16,
        spare_columns=0,
    )
    row = KV_HEADS * head_dim * case.k_cache.itemsize
    live, in_tiles = sum(contexts) * row, keys_in_tiles(contexts, contexts) * row
    # Two threadgroups share a group of eight heads where there are few keys.
    times = 2 if group > 4 and case.block_tables.shape[1] * case.block_size <= 512 else 1
    for loaded, unique in loaded_bytes(case):
        assert times * live <= loaded <= times * in_tiles  # the last tile loads its own keys again
        assert unique.per_threadgroup == times * live and unique.per_launch == live


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (64, 16)], ids=str)
def test_values_that_are_columns_of_the_keys_are_the_same_memory(contexts, rank, rope):
    """A simdgroup loads them again after the keys of its tile: they are in a cache then."""
    case = latent_case(contexts, rank, rope, num_heads=1, dtype=mx.float16, spare_columns=0)
    live, in_tiles = sum(contexts), keys_in_tiles(contexts, contexts)
    row, asked = (width * case.k_cache.itemsize for width in (rank + rope, rank + rope + rank))
    for loaded, unique in loaded_bytes(case):  # of the same memory
        assert live * asked <= loaded <= in_tiles * asked
        assert unique.per_launch == unique.per_threadgroup == live * row


@pytest.mark.sampled(8)
@pytest.mark.parametrize("window", [300, 600])
@pytest.mark.parametrize("num_tokens", [1, 3, 4], ids="L{}".format)
def test_blocks_outside_the_window_are_not_loaded(contexts, num_tokens, window):
    """Neither they nor their entries in the block table, which may be any number."""
    case = random_case(
        contexts,
        num_heads=KV_HEADS,
        num_kv_heads=KV_HEADS,
        num_tokens=num_tokens,
        dtype=mx.float16,
        spare_columns=0,
    )
    case.options["window"] = window
    reach = window + num_tokens - 1
    seen = [min(context, reach) for context in contexts]
    tables = np.array(case.block_tables)
    for table, context, keys in zip(tables, contexts, seen, strict=True):
        table[: (context - keys) // case.block_size] = 2**31 - 1
    case.block_tables = mx.array(tables)
    row = KV_HEADS * 64 * case.k_cache.itemsize
    for loaded, unique in loaded_bytes(case):
        assert unique.per_launch == sum(seen) * row
        assert loaded <= keys_in_tiles(contexts, seen) * row
