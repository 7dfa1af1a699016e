"""Block accounting without arrays: lifecycle, reuse, exhaustion, growth, forks."""

import numpy as np
import pytest

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockCopy, OutOfBlocksError


def test_paged_accounting_needs_30_blocks_where_static_reservation_takes_64():
    lengths = [32, 128, 64, 256]
    allocator = BlockAllocator(num_blocks=64, block_size=16)
    for seq_id, length in enumerate(lengths):
        allocator.admit(seq_id, length)
    assert allocator.store.blocks_in_use == 2 + 8 + 4 + 16 == 30
    assert len(lengths) * allocator.blocks_needed(max(lengths)) == 64


def test_lifecycle_admission_growth_on_the_boundary_release():
    allocator = BlockAllocator(num_blocks=64, block_size=4)
    allocator.admit(0, 12)
    assert len(allocator.table(0)) == 3 and allocator.store.num_available == 61
    allocator.make_writable(0, 12, 13)  # the thirteenth token opens a fourth block
    assert len(allocator.table(0)) == 4 and allocator.store.num_available == 60
    for position in (13, 14, 15):  # and the next three fill it
        allocator.make_writable(0, position, position + 1)
    assert len(allocator.table(0)) == 4
    allocator.make_writable(0, 16, 17)
    assert len(allocator.table(0)) == 5
    allocator.free(0)
    assert allocator.store.num_available == 64
    allocator.check_integrity()


def test_freed_blocks_are_handed_out_again():
    allocator = BlockAllocator(num_blocks=64, block_size=4)
    allocator.admit(1, 2)
    blocks_of_a = set(allocator.table(1).tolist())
    allocator.free(1)
    allocator.admit(2, 2)
    assert blocks_of_a & set(allocator.table(2).tolist())


def test_exhaustion_is_refused_and_ends_when_blocks_come_back():
    allocator = BlockAllocator(num_blocks=2, block_size=4)
    allocator.admit(0, 8)
    assert allocator.store.num_available == 0
    with pytest.raises(OutOfBlocksError, match="1 KV blocks needed, 0 available"):
        allocator.admit(1, 4)
    assert 1 not in allocator
    allocator.free(0)
    allocator.admit(1, 4)
    assert len(allocator.table(1)) == 1


def test_a_refused_append_changes_nothing():
    allocator = BlockAllocator(num_blocks=4, block_size=4)
    allocator.admit(0, 6)
    allocator.fork(0, 1)
    allocator.admit(2, 4)
    before = [allocator.table(i).tolist() for i in range(3)]
    with pytest.raises(OutOfBlocksError) as error:  # one copy and two new blocks; one is free
        allocator.make_writable(1, 6, 13)
    assert (error.value.needed, error.value.available) == (3, 1)
    assert [allocator.table(i).tolist() for i in range(3)] == before
    assert allocator.num_tokens(1) == 6 and allocator.store.cow_clones == 0
    allocator.check_integrity()


def test_fork_shares_everything_and_copies_only_the_tail_on_write():
    allocator = BlockAllocator(num_blocks=16, block_size=4)
    allocator.admit(0, 10)
    parent = allocator.table(0).tolist()
    allocator.fork(0, 1)
    assert allocator.table(1).tolist() == parent and allocator.store.blocks_in_use == 3
    assert allocator.store.refcount_histogram() == {0: 13, 2: 3}

    copies = allocator.make_writable(1, 10, 11)
    child = allocator.table(1).tolist()
    assert copies == [BlockCopy(src=parent[2], dst=child[2])]
    assert child[:2] == parent[:2] and child[2] not in parent
    assert allocator.table(0).tolist() == parent
    assert allocator.make_writable(0, 10, 11) == []  # the parent is alone on its tail again
    assert allocator.store.cow_clones == 1
    allocator.check_integrity()


def test_fork_at_a_block_boundary_copies_nothing():
    allocator = BlockAllocator(num_blocks=16, block_size=4)
    allocator.admit(0, 8)
    allocator.fork(0, 1)
    assert allocator.make_writable(1, 8, 9) == []
    assert allocator.store.cow_clones == 0


def test_shared_blocks_live_until_their_last_holder_goes():
    allocator = BlockAllocator(num_blocks=8, block_size=4)
    allocator.admit(0, 8)
    allocator.fork(0, 1)
    allocator.free(0)
    assert allocator.store.blocks_in_use == 2
    allocator.free(1)
    assert allocator.store.blocks_in_use == 0
    allocator.check_integrity()


def offered(allocator: BlockAllocator, seq_id: int, tokens: list[int]) -> list[int]:
    """Let a sequence leave its K/V for reuse; returns the blocks it had."""
    allocator.admit(seq_id, len(tokens))
    blocks = allocator.table(seq_id).tolist()
    allocator.register_tail(seq_id, tokens, len(tokens))
    allocator.free(seq_id)
    return blocks


def test_the_source_of_a_copy_is_kept_until_the_copy_is_done():
    allocator = BlockAllocator(num_blocks=3, block_size=4)
    (source,) = offered(allocator, 0, [1, 2, 3])
    admission = allocator.admit(1, 4, [1, 2, 3, 4])
    assert admission.copies == [BlockCopy(source, int(allocator.table(1)[0]))]
    assert allocator.store.num_available == 1 and allocator.store.cow_clones == 1
    allocator.check_integrity()
    allocator.admit(2, 4)
    with pytest.raises(OutOfBlocksError):
        allocator.admit(3, 1)
    allocator.store.copies_done()
    allocator.check_integrity()
    allocator.admit(3, 1)
    assert allocator.table(3).tolist() == [source]


@pytest.mark.parametrize("leaves", ["the holder of the source", "the holder of the copy"])
def test_a_block_in_a_copy_is_not_handed_out_again_before_the_copy_is_done(leaves):
    allocator = BlockAllocator(num_blocks=3, block_size=4)
    allocator.admit(0, 2)
    allocator.fork(0, 1)
    (copy,) = allocator.make_writable(1, 2, 3)
    allocator.free(0 if leaves == "the holder of the source" else 1)
    assert allocator.store.num_available == 1
    allocator.check_integrity()
    allocator.admit(2, 4)
    assert {copy.src, copy.dst}.isdisjoint(allocator.table(2).tolist())
    allocator.store.copies_done()
    assert allocator.store.num_available == 1
    allocator.check_integrity()


def test_a_copy_of_a_copy_names_the_first_source():
    allocator = BlockAllocator(num_blocks=8, block_size=4)
    (source,) = offered(allocator, 0, [1, 2, 3])
    allocator.admit(1, 4, [1, 2, 3, 4])
    allocator.fork(1, 2)
    assert allocator.make_writable(2, 3, 4) == [BlockCopy(source, int(allocator.table(2)[0]))]
    allocator.check_integrity()
    allocator.store.copies_done()
    allocator.fork(2, 3)
    (copy,) = allocator.make_writable(3, 3, 4)
    assert copy.src == int(allocator.table(2)[0])


def test_without_a_block_to_copy_into_an_idle_block_is_taken_over():
    allocator = BlockAllocator(num_blocks=2, block_size=4)
    first, last = offered(allocator, 0, [1, 2, 3, 4, 5, 6])
    admission = allocator.admit(1, 8, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (admission.num_cached, admission.copies) == (6, [])
    assert allocator.table(1).tolist() == [first, last]
    allocator.check_integrity()
    assert allocator.cached_prefix([1, 2, 3, 4, 5, 6, 7]) == 4  # it is no longer on offer


def test_a_block_that_somebody_holds_is_copied_into_the_last_free_one():
    allocator = BlockAllocator(num_blocks=3, block_size=4)
    allocator.admit(0, 6)
    allocator.register_tail(0, [1, 2, 3, 4, 5, 6], 6)
    admission = allocator.admit(1, 8, [1, 2, 3, 4, 5, 6, 7, 8])
    assert admission.num_cached == 6 and len(admission.copies) == 1
    assert allocator.store.num_available == 0
    allocator.check_integrity()


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_copy_leaves_the_blocks_that_are_to_be_spared(spare):
    allocator = BlockAllocator(num_blocks=4, block_size=4)
    offered(allocator, 0, [1, 2, 3, 4, 5, 6])
    admission = allocator.admit(1, 8, [1, 2, 3, 4, 5, 6, 7, 8], spare=spare)
    assert admission.num_cached == 6 and len(admission.copies) == (spare < 2)
    assert allocator.store.num_available >= spare


def test_a_refused_admission_changes_nothing():
    allocator = BlockAllocator(num_blocks=3, block_size=4)
    offered(allocator, 0, [1, 2, 3, 4, 5, 6])
    with pytest.raises(OutOfBlocksError) as error:
        allocator.admit(1, 8, [1, 2, 3, 4, 5, 6, 7, 8], spare=2)
    assert (error.value.needed, error.value.available) == (3, 2)
    assert (
        1 not in allocator and allocator.store.num_idle == 2 and allocator.store.num_available == 3
    )
    assert allocator.store.cow_clones == 0
    allocator.check_integrity()


def test_slots_follow_the_block_table():
    allocator = BlockAllocator(num_blocks=8, block_size=4)
    allocator.admit(0, 10)
    table = allocator.table(0)
    expected = [table[p // 4] * 4 + p % 4 for p in range(2, 10)]
    np.testing.assert_array_equal(allocator.slots(0, 2, 10), expected)


def test_tables_of_many_long_sequences_grow_and_rows_are_reused():
    allocator = BlockAllocator(num_blocks=100_000, block_size=1)
    for seq_id in range(300):
        allocator.admit(seq_id, 300)
    seen = allocator.block_tables.rows(allocator.table_rows(range(300)))
    assert seen.shape == (300, 300) and len(np.unique(seen)) == 90_000
    for seq_id in range(300):
        allocator.free(seq_id)
    allocator.admit(1000, 3)
    assert len(allocator.table(1000)) == 3
    allocator.check_integrity()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: BlockAllocator(0, 4), "num_blocks is 0"),
        (lambda a: BlockAllocator(4, 0), "block_size is 0"),
        (lambda a: a.admit(0, 4), "seq_id 0 is in use"),
        (lambda a: a.register_tail(9, [], 0), "seq_id 9 is not known"),
        (lambda a: a.fork(9, 10), "seq_id 9 is not known"),
        (lambda a: a.fork(0, 0), "child_seq_id 0 is in use"),
        (lambda a: a.free(9), "seq_id 9 is not known"),
        (lambda a: a.make_writable(0, 6, 7), "expected start <= 5"),
        (lambda a: a.table(9), "seq_id 9 is not known"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_named(call, message):
    allocator = BlockAllocator(num_blocks=8, block_size=4)
    allocator.admit(0, 5)
    with pytest.raises(ValueError, match=message):
        call(allocator)


def test_what_was_offered_for_reuse_is_no_longer_private_but_the_rest_still_is(monkeypatch):
    allocator, tokens = BlockAllocator(num_blocks=8, block_size=4), list(range(12))
    allocator.admit(0, 12)
    allocator.make_writable(0, 0, 12)
    allocator.register_prefix(0, tokens, 8)
    assert allocator.cached_prefix([*tokens, 0]) == 8
    appended = BlockAllocator.make_writable
    monkeypatch.setattr(BlockAllocator, "make_writable", None)
    assert allocator.append_each([0], [8]) == ([], None)  # nothing to look up
    monkeypatch.setattr(BlockAllocator, "make_writable", appended)
    allocator.make_writable(0, 7, 8)
    assert allocator.cached_prefix([*tokens, 0]) == 4
    allocator.check_integrity()


def test_one_more_token_each_takes_blocks_only_where_they_are_full():
    allocator = BlockAllocator(num_blocks=10, block_size=4)
    for seq_id, num_tokens in enumerate((4, 5, 7, 8)):
        allocator.admit(seq_id, num_tokens)
    allocator.fork(1, 5)
    copies, _ = allocator.append_each([0, 1, 2], [4, 5, 7])
    assert [len(allocator.table(seq_id)) for seq_id in range(4)] == [2, 2, 2, 2]
    assert [allocator.num_tokens(seq_id) for seq_id in range(4)] == [5, 6, 8, 8]
    assert [copy.dst for copy in copies] == [int(allocator.table(1)[1])]
    allocator.store.copies_done()
    allocator.check_integrity()
    with pytest.raises(OutOfBlocksError):
        allocator.append_each([0, 1, 2, 3], [5, 6, 8, 8])


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a.store.counts.__setitem__(int(a.table(0)[0]), 2),
        lambda a: a.store.free.append(int(a.table(0)[0])),
        lambda a: a.store.free.pop(),
        lambda a: a.store.free.append(a.store.free[-1]),
        lambda a: a.block_tables.extend(a._sequences[0].row, [a.store.free[-1]]),
        lambda a: a.store.origins.__setitem__(a.store.free[-1], a.store.free[-1]),
        lambda a: a.store.origins.__setitem__(int(a.table(0)[0]), int(a.table(0)[1])),
    ],
    ids=[
        "ref count",
        "held and free",
        "lost block",
        "free twice",
        "table too long",
        "free and in a copy",
        "copy without a source",
    ],
)
def test_check_integrity_sees_damage(damage):
    allocator = BlockAllocator(num_blocks=8, block_size=4)
    allocator.admit(0, 6)
    allocator.check_integrity()
    damage(allocator)
    with pytest.raises(AssertionError):
        allocator.check_integrity()


def test_freed_blocks_are_used_before_those_added():
    allocator = BlockAllocator(4, 2)
    allocator.admit(0, 4)
    allocator.admit(1, 4)
    allocator.free(0)
    allocator.grow(8)
    allocator.admit(2, 12)
    assert allocator.table(2).tolist() == [0, 1, 4, 5, 6, 7]
    allocator.check_integrity()


def test_a_sequence_cut_back_keeps_its_first_blocks_and_gives_back_the_others():
    allocator = BlockAllocator(6, 2)
    allocator.admit(0, 9)
    allocator.truncate(0, 3)
    assert allocator.table(0).tolist() == [0, 1] and allocator.num_tokens(0) == 3
    allocator.truncate(0, 7)
    assert allocator.num_tokens(0) == 3
    allocator.admit(1, 8)
    assert allocator.table(1).tolist() == [2, 3, 4, 5]
    allocator.check_integrity()


def test_what_was_cut_off_is_offered_no_more():
    allocator = BlockAllocator(8, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    allocator.admit(0, 6)
    allocator.register_prefix(0, tokens, 6)
    allocator.truncate(0, 4)
    allocator.check_integrity()
    allocator.make_writable(0, 4, 6)
    allocator.register_prefix(0, [1, 2, 3, 4, 7, 8], 6)
    allocator.check_integrity()
    assert allocator.cached_prefix([1, 2, 3, 4, 7, 8, 9]) == 6


def test_blocks_of_a_fork_outlive_the_cut():
    allocator = BlockAllocator(8, 2)
    allocator.admit(0, 6)
    allocator.fork(0, 1)
    allocator.truncate(0, 2)
    (copy,) = allocator.make_writable(0, 1, 2)
    allocator.store.copies_done()
    assert (copy.src, allocator.table(1).tolist()) == (0, [0, 1, 2])
    assert allocator.store.blocks_in_use == 4
    allocator.check_integrity()
