"""Sequences that begin with the same blocks attend to these together: the same bits as alone."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.kv.block_tables import common_prefixes
from tests.support.ops.paged_cases import (
    OPTIONS,
    TOLERANCE,
    Case,
    attend,
    latent_case,
    random_case,
    worst_error,
)
from tests.support.ops.quantized_cases import quantized_case

SPLIT = 512  # keys of a split
FLOATS = mx.float32, mx.float16, mx.bfloat16


def shared(case: Case, rng: np.random.Generator, most: int = 10**6) -> mx.array:
    """Let sequences begin with full blocks of an earlier one, at most so many keys; poison the
    blocks that they had. Returns the argument of the op."""
    tables, lens = np.array(case.block_tables), np.array(case.context_lens)
    used = -(-lens // case.block_size)
    before = {int(b) for table, count in zip(tables, used, strict=True) for b in table[:count]}
    for i in range(1, len(tables)):
        parent = int(rng.integers(i))
        limit = min(lens[parent], lens[i] - 1, most) // case.block_size
        count = int(limit if rng.random() < 0.5 else rng.integers(limit + 1))
        tables[i, :count] = tables[parent, :count]
    case.block_tables = mx.array(tables)
    kept = {int(b) for table, count in zip(tables, used, strict=True) for b in table[:count]}
    floats = "k_scales" not in case.options
    caches = [case.k_cache, case.v_cache] if floats else [case.options[n][0] for n in SCALES]
    for cache in caches:
        for block in before - kept:
            cache[:, block] = mx.nan
    if floats:
        case.k_cache, case.v_cache = caches
    return prefixes_of(case)


SCALES = "k_scales", "v_scales"


def prefixes_of(case: Case) -> mx.array:
    used = -(-np.array(case.context_lens) // case.block_size)
    found = common_prefixes(np.array(case.block_tables), used)
    found[1] *= case.block_size
    return mx.array(found)


def assert_same_bits(case: Case, prefixes: mx.array, expected: Case | None = None) -> None:
    """With the argument as without it, and as float64."""
    alone = attend(case)
    together = attend(case, shared_prefixes=prefixes)
    for a, b in zip(together, alone, strict=True):
        assert mx.array_equal(a, b)
    want, _ = (expected or case).expected()
    assert worst_error(together[0], want) < TOLERANCE[case.q.dtype]


def test_prefixes_are_common_to_neighbours():
    entries = np.array([[1, 2, 9], [1, 3, 4], [5, 0, 0], [1, 2, 4], [1, 2, 4]], np.int32)
    order, same = common_prefixes(entries, np.array([3, 3, 1, 3, 2], np.int32))
    assert sorted(order) == list(range(5))
    for i in range(1, 5):
        a, b = entries[order[i - 1]], entries[order[i]]
        ends = np.array([3, 3, 1, 3, 2])[order[i - 1 : i + 1]].min()
        equal = a[:ends] == b[:ends]
        assert same[i] == (ends if equal.all() else equal.argmin())
    place = {int(sequence): i for i, sequence in enumerate(order)}
    assert same[max(place[3], place[4])] == 2 and same[0] == 0
    assert abs(place[3] - place[4]) == 1  # neighbours, because they have the most in common


@pytest.mark.sampled(50)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(170))
def test_random_trees(seed, dtype):
    """4 cases each: 2,040 in all."""
    rng = np.random.default_rng([seed, FLOATS.index(dtype)])
    for case_number in range(4):
        heads = int(rng.choice([1, 2, 3]))
        contexts = rng.integers(3, 3 * SPLIT, int(rng.integers(2, 9))).tolist()
        case = random_case(
            contexts,
            num_kv_heads=heads,
            num_heads=heads * int(rng.choice([1, 2, 4, 9])),
            head_dim=int(rng.choice([32, 64])),
            block_size=int(rng.choice([8, 16, 48])),
            num_tokens=int(rng.choice([1, 1, 1, 3])),
            dtype=dtype,
            options=rng.choice(sorted(set(OPTIONS) - {"mapping"}), 1).tolist(),
            seed=case_number + 100 * seed,
        )
        assert_same_bits(case, shared(case, rng))


@pytest.mark.parametrize("kv_bits", [8, 6, 4])
def test_quantized_pools(kv_bits):
    rng = np.random.default_rng(8)
    case, expected = quantized_case(kv_bits, [900, 700, 650, 530, 1100], num_heads=8, seed=1)
    prefixes = shared(case, rng)
    assert_same_bits(case, prefixes, replace(expected, block_tables=case.block_tables))


def test_latents():
    case = latent_case([900, 700, 650, 1100], 64, 16, num_heads=4, seed=2)
    tables = np.array(case.block_tables)
    tables[1:, :40] = tables[0, :40]
    case.block_tables = mx.array(tables)
    prefixes = prefixes_of(case)
    assert prefixes[1].tolist() == [0, 640, 640, 640]
    assert_same_bits(case, prefixes)


@pytest.mark.parametrize("count", [2, 5, 40, 90])
def test_shared_keys_are_read_from_one_table(count):
    """Sequences that say they share what they do not get the first one's keys."""
    contexts = [SPLIT + 70] * count
    case = random_case(contexts, seed=3)
    common = SPLIT + 64
    order = np.arange(count)[::-1]
    prefixes = mx.array(np.stack([order, [0] + [common] * (count - 1)]).astype(np.int32))
    tables = np.array(case.block_tables)
    out, _ = attend(case, shared_prefixes=prefixes)
    num_parts = -(-count * 2 // 128)  # rows of a KV head that fit together
    size = count // num_parts + (num_parts > 1)
    parts = [order[i : i + size] for i in range(0, count, size)]
    for part in parts:
        tables[part, : SPLIT // 16] = tables[part[0], : SPLIT // 16]
    mixed = replace(case, block_tables=mx.array(tables))
    assert mx.array_equal(out, attend(mixed)[0])
    assert not mx.array_equal(out, attend(case)[0])


@pytest.mark.parametrize(
    "prefixes",
    [[[5, -1, 2**31 - 1], [0, 4000, 4000]], [[0, 0, 0], [-5, 2**31 - 1, -(2**31)]]],
    ids=["order", "lengths"],
)
def test_numbers_out_of_range_read_nothing_outside(prefixes):
    case = random_case([600, 700, 30], seed=4)
    out, _ = attend(case, shared_prefixes=mx.array(prefixes, mx.int32))
    assert out.shape == case.q.shape


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        (mx.zeros((2, 3), mx.float32), "has dtype float32: expected int32"),
        (mx.zeros((2, 2), mx.int32), "shared_prefixes has shape"),
        (mx.zeros((3,), mx.int32), "shared_prefixes has shape"),
    ],
)
def test_a_wrong_argument_is_refused(prefixes, message):
    case = random_case([600, 700, 30], seed=5)
    with pytest.raises(ValueError, match=message):
        attend(case, shared_prefixes=prefixes)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(200))
def test_random_trees_of_ragged_batches(seed):
    """Many sequences with 1 to 9 tokens each: some do not fit with the others and are alone."""
    rng = np.random.default_rng([seed, 9])
    count = int(rng.integers(2, 45))
    contexts = rng.integers(20, 3 * SPLIT, count).tolist()
    heads = int(rng.choice([1, 2]))
    case = random_case(
        contexts,
        num_kv_heads=heads,
        num_heads=heads * int(rng.choice([1, 2, 4])),
        head_dim=32,
        dtype=FLOATS[seed % 3],
        options=rng.choice(["window_21", "window_large", "sinks", "softcap"], 1).tolist(),
        seed=seed,
    )
    prefixes = shared(case, rng)
    lengths = rng.choice([1, 1, 1, 2, 5, 9], count)
    begins = mx.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    shape = int(lengths.sum()), case.q.shape[1], case.q.shape[3]
    q = mx.random.normal(shape, key=mx.random.key(seed)).astype(case.q.dtype)
    arrays = q, [case.k_cache], [case.v_cache], case.block_tables, case.context_lens, begins
    alone = ops.paged_attention_varlen(*arrays, **case.options)
    together = ops.paged_attention_varlen(*arrays, **case.options, shared_prefixes=prefixes)
    assert mx.array_equal(alone, together) and not mx.isnan(alone).any()


def test_a_tile_that_was_alone_stays_so():
    """Of 16 rows at most 15 share in a quantized pool: the last sequence is alone in the first
    split, and would fit in the second one."""
    case, _ = quantized_case(8, [600, 1100, 1100], num_heads=8, num_kv_heads=2, seed=7)
    tables = np.array(case.block_tables)
    tables[1:, :32] = tables[0, :32]
    tables[2, :64] = tables[1, :64]
    begins, q = mx.array([0, 2, 3, 4]), mx.random.normal((4, 8, 64), key=mx.random.key(1))
    arrays = q, [case.k_cache], [case.v_cache], mx.array(tables), case.context_lens, begins
    prefixes = mx.array([[0, 1, 2], [0, 512, 1024]])
    alone = ops.paged_attention_varlen(*arrays, **case.options)
    together = ops.paged_attention_varlen(*arrays, **case.options, shared_prefixes=prefixes)
    assert mx.array_equal(alone, together) and not mx.isnan(alone).any()


def test_ragged_batches():
    """Decodes, drafts and a chunk, of which the first three share blocks."""
    lengths = [1, 1, 4, 40]
    contexts = [700, 650, 604, 640]
    case = random_case(contexts, seed=6, dtype=mx.bfloat16)
    tables = np.array(case.block_tables)
    tables[1:, :36] = tables[0, :36]
    begins = mx.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    q = mx.random.normal((sum(lengths), 4, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    pool = [case.k_cache], [case.v_cache]
    case.block_tables = mx.array(tables)
    arrays = q, *pool, case.block_tables, case.context_lens, begins
    alone = ops.paged_attention_varlen(*arrays)
    prefixes = prefixes_of(case)
    assert prefixes[1].tolist() == [0, 576, 576, 576]
    assert mx.array_equal(alone, ops.paged_attention_varlen(*arrays, shared_prefixes=prefixes))
    own = mx.array(np.where(np.arange(tables.shape[1]) < 36, tables[0], tables[3]))[None]
    single = ops.paged_attention(q[6:].transpose(1, 0, 2)[None], *pool, own, case.context_lens[3:])
    assert mx.array_equal(single[0].transpose(1, 0, 2), alone[6:])
