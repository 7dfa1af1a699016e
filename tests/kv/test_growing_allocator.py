"""Block bookkeeping that grows and cuts sequences back."""

from mlx_paged.kv.growing_allocator import GrowingAllocator


def test_freed_blocks_are_used_before_those_added():
    allocator = GrowingAllocator(4, 2)
    allocator.admit(0, 4)
    allocator.admit(1, 4)
    allocator.free(0)
    allocator.grow(8)
    allocator.admit(2, 12)
    assert allocator.table(2).tolist() == [0, 1, 4, 5, 6, 7]
    allocator.check_integrity()


def test_a_sequence_cut_back_keeps_its_first_blocks_and_gives_back_the_others():
    allocator = GrowingAllocator(6, 2)
    allocator.admit(0, 9)
    allocator.truncate(0, 3)
    assert allocator.table(0).tolist() == [0, 1] and allocator.num_tokens(0) == 3
    allocator.truncate(0, 7)
    assert allocator.num_tokens(0) == 3
    allocator.admit(1, 8)
    assert allocator.table(1).tolist() == [2, 3, 4, 5]
    allocator.check_integrity()


def test_what_was_cut_off_is_offered_no_more():
    allocator = GrowingAllocator(8, 2)
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
    allocator = GrowingAllocator(8, 2)
    allocator.admit(0, 6)
    allocator.fork(0, 1)
    allocator.truncate(0, 2)
    (copy,) = allocator.make_writable(0, 1, 2)
    allocator.copies_done()
    assert (copy.src, allocator.table(1).tolist()) == (0, [0, 1, 2])
    assert allocator.blocks_in_use == 4
    allocator.check_integrity()
