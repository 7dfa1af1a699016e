"""Reuse of full blocks by chained hashes."""

import pytest

from mlx_paged import prefix_cache
from mlx_paged.block_allocator import BlockAllocator
from mlx_paged.prefix_cache import ROOT, PrefixCache, block_bytes, chain_hash

BLOCK = 4


def computed(allocator: BlockAllocator, seq_id: int, tokens: list[int]) -> int:
    """Add a sequence and pretend that its K/V has been computed; returns what was cached."""
    cached = allocator.add_sequence(seq_id, len(tokens), tokens)
    allocator.commit(seq_id, tokens, len(tokens))
    return cached


def test_three_prompts_share_the_blocks_of_their_system_prompt():
    system = list(range(12))  # three blocks
    allocator = BlockAllocator(num_blocks=16, block_size=BLOCK)
    assert computed(allocator, 1, [*system, 100, 101]) == 0
    assert computed(allocator, 2, [*system, 200, 201]) == 12
    assert computed(allocator, 3, [*system, 200, 301]) == 12
    tables = [allocator.table(i).tolist() for i in (1, 2, 3)]
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert len({table[3] for table in tables}) == 3
    assert allocator.blocks_in_use == 6
    assert allocator.refcount_histogram == {0: 10, 1: 3, 3: 3}


def test_equal_blocks_after_different_prefixes_are_not_shared():
    allocator = BlockAllocator(num_blocks=16, block_size=BLOCK)
    computed(allocator, 1, [1, 1, 1, 1, 7, 7, 7, 7, 0])
    assert computed(allocator, 2, [2, 2, 2, 2, 7, 7, 7, 7, 0]) == 0
    assert chain_hash(b"a", b"tokens") != chain_hash(b"b", b"tokens")


def test_the_last_token_is_always_left_to_compute():
    allocator = BlockAllocator(num_blocks=16, block_size=BLOCK)
    tokens = list(range(8))
    computed(allocator, 1, tokens)
    assert allocator.cached_prefix(tokens) == 4
    assert allocator.cached_prefix([*tokens, 8]) == 8
    assert computed(allocator, 2, tokens) == 4


def test_blocks_of_finished_sequences_stay_until_they_are_needed_oldest_first():
    allocator = BlockAllocator(num_blocks=4, block_size=BLOCK)
    computed(allocator, 1, [1] * 8)
    computed(allocator, 2, [2] * 8)
    allocator.free(1)
    allocator.free(2)
    assert (allocator.blocks_in_use, allocator.num_cached, allocator.num_available) == (0, 4, 4)
    allocator.add_sequence(3, 4)  # takes the end of the oldest chain
    assert allocator.cached_prefix([1] * 9) == 4
    assert allocator.cached_prefix([2] * 9) == 8
    assert computed(allocator, 4, [2] * 9) == 8
    allocator.check_integrity()


def test_shared_cached_blocks_are_not_counted_as_free_for_the_rest_of_the_prompt():
    allocator = BlockAllocator(num_blocks=3, block_size=BLOCK)
    computed(allocator, 1, [1] * 8)
    allocator.free(1)
    assert computed(allocator, 2, [1] * 8 + [2] * 4) == 8
    assert allocator.num_available == 0
    allocator.check_integrity()


def test_a_rewritten_block_is_forgotten():
    allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
    computed(allocator, 1, [1] * 8)
    allocator.make_writable(1, 5, 6)
    assert allocator.cached_prefix([1] * 9) == 4
    allocator.check_integrity()


def test_blocks_after_a_rewritten_one_are_known_by_their_new_prefix():
    allocator = BlockAllocator(num_blocks=16, block_size=BLOCK)
    computed(allocator, 1, [1] * 4)
    rewritten = [2] * 4 + [3] * 4
    allocator.make_writable(1, 0, 8)
    allocator.commit(1, rewritten, 8)
    computed(allocator, 2, [1] * 4)
    assert allocator.cached_prefix([1] * 4 + [3] * 4 + [0]) == 4
    assert allocator.cached_prefix([*rewritten, 0]) == 8


def test_blocks_that_became_full_by_generation_are_reusable():
    allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
    tokens = [1, 2, 3, 4, 5]
    computed(allocator, 1, tokens)
    for token in (6, 7, 8, 9):
        allocator.make_writable(1, len(tokens), len(tokens) + 1)
        tokens.append(token)
        allocator.commit(1, tokens, len(tokens))
    allocator.free(1)
    assert allocator.cached_prefix(tokens) == 8


def test_a_salt_keeps_tenants_apart():
    allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
    allocator.add_sequence(1, 8, salt=b"a")
    allocator.commit(1, [1] * 8, 8)
    assert allocator.cached_prefix([1] * 9, salt=b"a") == 8
    assert allocator.cached_prefix([1] * 9, salt=b"b") == 0


def test_a_colliding_hash_is_not_a_hit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_cache, "chain_hash", lambda parent, tokens: b"same for all")
    cache = PrefixCache()
    cache.register(0, ROOT, block_bytes([1, 2, 3, 4], 0, BLOCK))
    assert [entry.block for entry in cache.match([1, 2, 3, 4], BLOCK)] == [0]
    assert cache.match([4, 3, 2, 1], BLOCK) == []
    assert cache.match([1, 2, 3, 4], BLOCK, salt=b"other parent") == []
