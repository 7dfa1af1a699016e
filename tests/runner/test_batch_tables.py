"""Block tables kept from step to step are at any time those of the allocator."""

import random
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.attention.shared_prefixes import FEWEST_SHARED, SharedPrefixes, fewest_shared
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import BlockTables
from mlx_paged.kv.shapes import KVShape
from mlx_paged.runner.batch import SPARE_COLUMNS, BatchTables

BLOCK = 4


@pytest.fixture
def allocator() -> BlockAllocator:
    """Sequences 0, 1 and 2 with 2, 3 and 1 blocks, the last one of each full."""
    allocator = BlockAllocator(num_blocks=200, block_size=BLOCK)
    for seq_id, blocks in enumerate((2, 3, 1)):
        allocator.admit(seq_id, blocks * BLOCK)
    return allocator


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often whole rows were copied, and arrays made for the device."""
    counts: Counter[str] = Counter()

    def count(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args, **options):
            counts[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(BlockTables, "rows")
    count(mx, "array")
    return counts


def append(allocator: BlockAllocator, *seq_ids: int) -> None:
    allocator.append_each(seq_ids, [allocator.num_tokens(seq_id) for seq_id in seq_ids])


def assert_right(tables: BatchTables, allocator: BlockAllocator, seq_ids: list[int]) -> None:
    lengths = [len(allocator.table(seq_id)) for seq_id in seq_ids]
    assert tables.arrays[0].shape == (len(seq_ids), max(lengths, default=0))
    assert tables.arrays[0].dtype == mx.int32
    given = np.array(tables.arrays[0])
    for row, seq_id in zip(given, seq_ids, strict=True):
        expected = allocator.table(seq_id)
        np.testing.assert_array_equal(row[: len(expected)], expected)
    last = np.array(lengths, np.int32) - 1
    if seq_ids:
        expected = [allocator.table(seq_id)[-1] for seq_id in seq_ids]
        np.testing.assert_array_equal(tables.blocks_at(last), expected)


def test_a_batch_without_new_blocks_keeps_its_array(allocator, copied):
    tables = BatchTables(allocator)
    append(allocator, 0, 1, 2)
    tables.update([0, 1, 2])
    array = tables.arrays[0]
    copied.clear()
    for _ in range(BLOCK - 1):
        append(allocator, 0, 1, 2)
        tables.update([0, 1, 2])
    assert tables.arrays[0] is array and copied == {}
    assert_right(tables, allocator, [0, 1, 2])


def test_new_blocks_are_written_into_the_rows_that_got_them(allocator, copied):
    tables = BatchTables(allocator)
    tables.update([0, 1, 2])
    copied.clear()
    append(allocator, 1, 2)
    tables.update([0, 1, 2])
    assert copied == {"array": 1}
    assert_right(tables, allocator, [0, 1, 2])


def test_rows_may_outgrow_the_space_set_aside(allocator, copied):
    tables = BatchTables(allocator)
    tables.update([0, 1, 2])
    copied.clear()
    for _ in range((SPARE_COLUMNS + 1) * BLOCK):
        append(allocator, 1)
        tables.update([0, 1, 2])
    assert copied["rows"] == 1 and copied["array"] == SPARE_COLUMNS + 1
    assert_right(tables, allocator, [0, 1, 2])


def test_what_others_do_copies_nothing(allocator, copied):
    tables = BatchTables(allocator)
    tables.update([0, 1])
    array = tables.arrays[0]
    copied.clear()
    allocator.free(2)
    allocator.admit(7, 9)
    allocator.fork(7, 8)
    tables.update([0, 1])
    assert tables.arrays[0] is array and copied == {}


@pytest.mark.parametrize("after", [[0, 1], [1, 2], [2, 1, 0], [0, 1, 2, 9], [9, 1, 2], []], ids=str)
def test_rows_follow_who_joins_leaves_or_changes_places(allocator, after):
    tables = BatchTables(allocator)
    tables.update([0, 1, 2])
    allocator.admit(9, 5)
    tables.update(after)
    assert_right(tables, allocator, after)


def test_a_block_copied_on_write_shows(allocator):
    tables = BatchTables(allocator)
    append(allocator, 0)  # a part-filled block
    tables.update([0, 1])
    allocator.fork(0, 5)
    append(allocator, 0)
    assert allocator.store.cow_clones == 1
    tables.update([0, 1])
    assert_right(tables, allocator, [0, 1])


def test_a_sequence_that_was_preempted_and_is_back_has_its_new_blocks(allocator):
    """It may even get the same row, as long as before."""
    tables = BatchTables(allocator)
    tables.update([0, 1])
    before = np.array(tables.arrays[0])
    allocator.free(1)
    allocator.admit(6, 1)  # takes a block that was its
    allocator.admit(1, 3 * BLOCK)
    allocator.free(6)
    tables.update([0, 1])
    assert not np.array_equal(before, np.array(tables.arrays[0]))
    assert_right(tables, allocator, [0, 1])


def test_the_same_row_with_other_blocks_is_noticed(allocator):
    tables = BatchTables(allocator)
    tables.update([1])
    row = allocator.table_rows([1])
    allocator.free(1)
    allocator.fork(0, 1)
    append(allocator, 1)
    assert allocator.table_rows([1]) == row and len(allocator.table(1)) == 3
    tables.update([1])
    assert_right(tables, allocator, [1])


def test_whatever_happens_between_steps_the_tables_are_right():
    rng = random.Random(0)
    allocator = BlockAllocator(num_blocks=60, block_size=2)
    tables, batch, next_id = BatchTables(allocator), [0], 1
    allocator.admit(0, 3)
    for _ in range(2000):
        event = rng.random()
        if event < 0.06 and len(batch) < 6:
            allocator.admit(next_id, rng.randint(1, 5))
            batch.insert(rng.randint(0, len(batch)), next_id)
            next_id += 1
        elif event < 0.1 and len(batch) < 6 and batch:
            allocator.fork(rng.choice(batch), next_id)
            batch.append(next_id)
            next_id += 1
        elif event < 0.2 and batch:
            gone = rng.choice(batch)
            batch.remove(gone)
            allocator.free(gone)
        elif event < 0.24 and batch:
            back = rng.choice(batch)
            num_tokens = allocator.num_tokens(back)
            allocator.free(back)
            allocator.admit(back, num_tokens)
        elif event < 0.28:
            rng.shuffle(batch)
        if allocator.store.num_available >= len(batch):
            append(allocator, *batch)
            allocator.store.copies_done()
        tables.update(list(batch))
        assert_right(tables, allocator, batch)
        while batch and allocator.store.num_available < 12:
            allocator.free(batch.pop())


@pytest.mark.parametrize(
    ("heads", "dim", "kv_bits", "keys"),
    [(8, 128, None, 256), (2, 64, None, 2048), (8, 128, 8, 505), (64, 576, None, FEWEST_SHARED)],
)
def test_a_gpu_is_told_of_common_keys_that_are_a_mebibyte(heads, dim, kv_bits, keys, monkeypatch):
    shape = KVShape(heads, dim, dim, mx.float16, kv_bits=kv_bits)
    assert fewest_shared([shape]) == FEWEST_SHARED
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert fewest_shared([shape]) == keys
    assert (
        keys == FEWEST_SHARED or keys * shape.token_bytes >= 2**20 > (keys - 1) * shape.token_bytes
    )


@pytest.mark.parametrize(("fewest", "figures"), [(8, {"shared_keys": 8}), (9, {})])
def test_too_few_common_keys_are_not_named(allocator, fewest, figures):
    allocator.fork(0, 3)
    prefixes, noted = SharedPrefixes(allocator, 0, fewest), {}
    found = prefixes.of([0, 3], 2)
    prefixes.note(noted)
    assert prefixes.num_keys == 8 and noted == figures
    assert int(found[1].sum()) == 8 if figures else found is None


def test_without_cascade_no_common_keys_are_looked_for(allocator):
    allocator.fork(0, 3)
    prefixes, noted = BatchTables(allocator).prefixes, {}
    assert prefixes.of([0, 3], 2) is None
    prefixes.note(noted)
    assert noted == {}
