"""Reuse of K/V by chained hashes: full blocks, parts of a block, and why there was no more."""

import pytest

from mlx_paged.kv import group_prefixes, prefix_cache
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockCopy
from mlx_paged.kv.eviction import WorthOrder
from mlx_paged.kv.prefix_cache import (
    EVICTED_PER_BLOCK,
    MAX_SIBLINGS,
    PrefixCache,
    chain_hash,
    common_tokens,
    root_hash,
    token_bytes,
)
from mlx_paged.kv.prefix_match import MissReason, PrefixMatch

BLOCK = 8  # so that two tokens are the smallest run to be copied


def text(*runs: tuple[int, int]) -> list[int]:
    """Tokens: each run's first value repeated second-value times."""
    return [token for token, count in runs for _ in range(count)]


def computed(
    allocator: BlockAllocator, seq_id: int, tokens: list[int], salt: bytes = b""
) -> PrefixMatch:
    """Admit a sequence and pretend that its K/V has been computed."""
    admission = allocator.admit(seq_id, len(tokens), tokens, salt)
    allocator.store.copies_done()
    allocator.register_prefix(seq_id, tokens, len(tokens))
    return admission


def finished(allocator: BlockAllocator, tokens: list[int], salt: bytes = b"") -> PrefixMatch:
    """Let a sequence come and go, leaving its K/V for reuse."""
    admission = computed(allocator, -1, tokens, salt)
    allocator.register_tail(-1, tokens, len(tokens))
    allocator.free(-1)
    allocator.check_integrity()
    return admission


def looked_up(allocator: BlockAllocator, tokens: list[int]) -> PrefixMatch:
    """What a prompt would find now."""
    admission = allocator.admit(-2, len(tokens), tokens)
    allocator.store.copies_done()
    allocator.free(-2)
    allocator.check_integrity()
    return admission


class TestFullBlocks:
    def test_three_prompts_share_the_blocks_of_their_system_prompt(self):
        system = list(range(24))  # three blocks
        allocator = BlockAllocator(num_blocks=16, block_size=BLOCK)
        assert computed(allocator, 1, [*system, 100, 101]).num_cached == 0
        assert computed(allocator, 2, [*system, 200, 201]).num_cached == 24
        assert computed(allocator, 3, [*system, 200, 301]).num_cached == 24
        tables = [allocator.table(i).tolist() for i in (1, 2, 3)]
        assert tables[0][:3] == tables[1][:3] == tables[2][:3]
        assert len({table[3] for table in tables}) == 3
        assert allocator.store.blocks_in_use == 6
        assert allocator.store.refcount_histogram() == {0: 10, 1: 3, 3: 3}

    def test_equal_blocks_after_different_prefixes_are_not_shared(self):
        allocator = BlockAllocator(num_blocks=16, block_size=BLOCK)
        finished(allocator, text((1, BLOCK), (7, BLOCK)))
        assert looked_up(allocator, text((2, BLOCK), (7, BLOCK), (0, 1))).num_cached == 0
        assert chain_hash(b"a", b"tokens") != chain_hash(b"b", b"tokens")

    def test_blocks_of_finished_sequences_stay_until_they_are_needed_oldest_first(self):
        allocator = BlockAllocator(num_blocks=4, block_size=BLOCK)
        computed(allocator, 1, text((1, 16)))
        computed(allocator, 2, text((2, 16)))
        allocator.free(1)
        allocator.free(2)
        assert (
            allocator.store.blocks_in_use,
            allocator.store.num_idle,
            allocator.store.num_available,
        ) == (
            0,
            4,
            4,
        )
        allocator.admit(3, BLOCK)  # takes the end of the oldest chain
        assert allocator.cached_prefix(text((1, 17))) == 8
        assert allocator.cached_prefix(text((2, 17))) == 16
        assert computed(allocator, 4, text((2, 17))).num_cached == 16
        allocator.check_integrity()

    def test_shared_cached_blocks_are_not_counted_as_free_for_the_rest_of_the_prompt(self):
        allocator = BlockAllocator(num_blocks=3, block_size=BLOCK)
        finished(allocator, text((1, 16)))
        assert computed(allocator, 2, text((1, 16), (2, 8))).num_cached == 16
        assert allocator.store.num_available == 0
        allocator.check_integrity()

    def test_a_rewritten_block_is_forgotten(self):
        allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
        computed(allocator, 1, text((1, 16)))
        allocator.make_writable(1, 9, 10)
        assert allocator.cached_prefix(text((1, 17))) == 8
        allocator.check_integrity()

    def test_blocks_after_a_rewritten_one_are_known_by_their_new_prefix(self):
        allocator = BlockAllocator(num_blocks=16, block_size=BLOCK)
        computed(allocator, 1, text((1, 8)))
        rewritten = text((2, 8), (3, 8))
        allocator.make_writable(1, 0, 16)
        allocator.register_prefix(1, rewritten, 16)
        computed(allocator, 2, text((1, 8)))
        assert allocator.cached_prefix(text((1, 8), (3, 8), (0, 1))) == 8
        assert allocator.cached_prefix([*rewritten, 0]) == 16

    def test_blocks_that_became_full_by_generation_are_reusable(self):
        allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
        tokens = list(range(13))
        computed(allocator, 1, tokens)
        for token in range(13, 17):
            allocator.make_writable(1, token, token + 1)
            tokens.append(token)
            allocator.register_prefix(1, tokens, len(tokens))
        allocator.free(1)
        assert allocator.cached_prefix(tokens) == 16


AGREEING = {
    "where texts differ": ([*range(12), 99, 99, 99, 99, 99], 12),
    "smallest run": ([*range(10), 99, 99], 10),
    "too short a run": ([*range(9), 99, 99], 8),
    "within a block": ([*range(11)], 10),
    "all but the last token": ([*range(10)], 8),
    "full block": ([*range(16)], 15),
    "full block and more": ([*range(17)], 16),
    "first block": ([0, 1, 2, 99], 3),
    "second token differs": ([0, 99, 2, 3], 0),
}
"""Prompts that begin as sixteen known tokens do, and how many are then cached."""


class TestPartsOfABlock:
    @pytest.mark.parametrize(("prompt", "num_cached"), AGREEING.values(), ids=AGREEING)
    def test_a_block_is_copied_for_the_tokens_that_agree(self, prompt, num_cached):
        allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
        computed(allocator, 1, list(range(16)))
        known = allocator.table(1).tolist()
        assert allocator.cached_prefix(prompt) == num_cached
        admission = allocator.admit(2, len(prompt), prompt)
        shared, run = divmod(num_cached, BLOCK)
        table = allocator.table(2).tolist()
        assert admission.num_cached == num_cached and table[:shared] == known[:shared]
        assert admission.copies == ([BlockCopy(known[shared], table[shared])] if run else [])
        assert set(known).isdisjoint(table[shared:])
        allocator.check_integrity()

    def test_a_conversation_goes_on_from_its_unfinished_block(self):
        allocator = BlockAllocator(num_blocks=16, block_size=BLOCK)
        turn = list(range(21))
        finished(allocator, turn)
        second = finished(allocator, [*turn, 50, 51, 52, 53, 54, 55])
        assert (second.num_cached, len(second.copies)) == (21, 1)
        assert second.miss is MissReason.END
        third = looked_up(allocator, [*turn, 50, 51, 52, 53, 54, 55, 60])
        assert third.num_cached == 27 and third.miss is None

    @pytest.mark.parametrize("lengths", [(11, 14), (14, 11)], ids=str)
    def test_the_longest_of_several_runs_is_taken(self, lengths):
        allocator = BlockAllocator(num_blocks=16, block_size=BLOCK)
        for length in lengths:
            finished(allocator, [*range(length), *text((90, 16 - length))])
        assert looked_up(allocator, [*range(17)]).num_cached == 14

    def test_a_longer_tail_replaces_a_shorter_one(self):
        allocator = BlockAllocator(num_blocks=5, block_size=BLOCK)
        finished(allocator, text((90, 5)))
        for length in (11, 13, 12):  # the last is covered by the one before
            finished(allocator, list(range(length)))
        assert allocator.store.num_idle == 4
        allocator.admit(5, 2 * BLOCK)  # the free block and the shorter tail
        assert allocator.cached_prefix(list(range(17))) == 13
        assert allocator.cached_prefix(text((90, 17))) == 5

    def test_a_tail_is_not_replaced_by_another_text(self):
        allocator = BlockAllocator(num_blocks=5, block_size=BLOCK)
        finished(allocator, text((90, 5)))
        finished(allocator, list(range(11)))
        finished(allocator, [*range(8), 50, 51, 52, 53])
        allocator.admit(5, 2 * BLOCK)  # the free block and the one unused longest
        assert allocator.cached_prefix(text((90, 17))) == 0
        assert allocator.cached_prefix(list(range(17))) == 11

    def test_a_tail_may_be_offered_again_after_others_were(self):
        allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
        for _ in range(2):
            for other in range(MAX_SIBLINGS + 1):
                finished(allocator, [*text((other, 3))])
        assert allocator.store.num_idle == MAX_SIBLINGS + 1

    def test_a_tail_shorter_than_a_usable_run_is_not_kept(self):
        allocator = BlockAllocator(num_blocks=4, block_size=BLOCK)
        finished(allocator, list(range(9)))
        assert allocator.store.num_idle == 1

    def test_only_the_latest_blocks_after_a_prefix_are_compared(self):
        allocator = BlockAllocator(num_blocks=64, block_size=BLOCK)
        prefix = text((0, 8))
        finished(allocator, prefix + text((1, 6), (2, 2)))
        prompt = prefix + text((1, 6), (3, 3))
        for other in range(10, 10 + MAX_SIBLINGS):
            assert looked_up(allocator, prompt).num_cached == 14
            finished(allocator, prefix + text((other, 8)))
        assert looked_up(allocator, prompt).num_cached == 8

    def test_a_tail_that_is_written_on_is_forgotten(self):
        allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
        tokens = list(range(12))
        computed(allocator, 1, tokens)
        allocator.register_tail(1, tokens, 12)
        assert allocator.cached_prefix([*tokens, 0]) == 12
        allocator.make_writable(1, 12, 13)
        assert allocator.cached_prefix([*tokens, 0]) == 8
        allocator.check_integrity()

    def test_a_tail_includes_full_blocks_that_were_not_offered_yet(self):
        allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
        allocator.admit(1, 20)
        allocator.register_tail(1, list(range(20)), 20)
        assert allocator.cached_prefix(list(range(30))) == 20

    def test_a_tail_before_blocks_that_are_known_already_keeps_its_own_prefix(self):
        allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
        tokens = text((1, 8), (2, 8), (3, 8))
        computed(allocator, 1, tokens)
        allocator.make_writable(1, 12, 24)
        allocator.fork(1, 2)
        computed(allocator, 3, tokens)
        allocator.register_tail(1, tokens, 12)
        assert allocator.cached_prefix(text((1, 8), (2, 7))) == 14
        allocator.register_prefix(1, tokens, 24)
        allocator.register_tail(1, tokens, 20)
        assert allocator.cached_prefix(text((1, 8), (2, 8), (3, 8), (3, 5))) == 24
        allocator.check_integrity()

    @pytest.mark.parametrize("tokens", [1, 5, 8])
    @pytest.mark.parametrize("where", range(9))
    def test_common_tokens_counts_those_before_the_first_difference(self, tokens, where):
        a = [7, -1, 2**40, 0, 5, 6, 7, 8][:tokens]
        b = [*a[:where], *(token + 2**33 for token in a[where:])]
        assert common_tokens(token_bytes(a, 0, 8), token_bytes(b, 0, 8)) == min(tokens, where)


ENDS = {
    "empty": ([], 0, MissReason.TOO_SHORT),
    "no usable run": ([0, 1], 0, MissReason.TOO_SHORT),
    "just a usable run": ([0, 1, 2], 2, None),
    "another text": ([9, 9, 9], 0, MissReason.UNSEEN),
    "only the first token is known": ([0, 9, 9, *range(30)], 0, MissReason.UNSEEN),
    "differs in the first block": ([0, 1, 9, 9], 2, MissReason.DIVERGED),
    "differs after a block": ([*range(8), 9, 9, 9], 8, MissReason.DIVERGED),
    "differs within a block": ([*range(11), 9, 9, 9], 11, MissReason.DIVERGED),
    "differs after the last full block": ([*range(24), 9, 9, 9], 24, MissReason.DIVERGED),
    "differs within the tail": ([*range(26), 9, 9, 9], 26, MissReason.DIVERGED),
    "goes on": ([*range(40)], 28, MissReason.END),
    "known whole": ([*range(28)], 27, None),
    "too little left": ([*range(26)], 24, None),
    "nothing left": ([*range(17)], 16, None),
}
"""Prompts after ``range(28)`` became known: how much of them is cached, and why not more."""


class TestMisses:
    @pytest.mark.parametrize(("prompt", "num_cached", "miss"), ENDS.values(), ids=ENDS)
    def test_what_ended_the_reuse(self, prompt, num_cached, miss):
        allocator = BlockAllocator(num_blocks=16, block_size=BLOCK)
        finished(allocator, list(range(28)))  # three blocks and a tail of four
        admission = looked_up(allocator, prompt)
        assert (admission.num_cached, admission.miss) == (num_cached, miss)

    def test_a_text_that_ends_with_a_full_block_ends_there(self):
        allocator = BlockAllocator(num_blocks=16, block_size=BLOCK)
        finished(allocator, list(range(16)))
        assert looked_up(allocator, list(range(40))).miss is MissReason.END

    def test_nobody_looked(self):
        assert BlockAllocator(4, BLOCK).admit(0, 8).miss is MissReason.DISABLED

    @pytest.mark.parametrize("left", [0, 1], ids=["all gone", "the first block is left"])
    def test_evicted_blocks_are_remembered_until_they_are_known_again(self, left):
        allocator = BlockAllocator(num_blocks=3, block_size=BLOCK)
        finished(allocator, list(range(24)))
        allocator.admit(1, (3 - left) * BLOCK)
        allocator.free(1)
        missed = looked_up(allocator, list(range(18)))
        assert (missed.num_cached, missed.miss) == (8 * left, MissReason.EVICTED)
        finished(allocator, list(range(18)))
        assert looked_up(allocator, list(range(18))).miss is None

    def test_an_evicted_tail_can_be_offered_again(self):
        allocator = BlockAllocator(num_blocks=1, block_size=BLOCK)
        for _ in range(2):
            finished(allocator, list(range(5)))
            assert allocator.cached_prefix(list(range(9))) == 5
            allocator.store.drop_idle()
            assert looked_up(allocator, list(range(8))).miss is MissReason.UNSEEN

    def test_an_evicted_block_is_missed_though_a_part_of_another_is_reused(self):
        allocator = BlockAllocator(num_blocks=3, block_size=BLOCK)
        finished(allocator, text((1, 8), (2, 8)))
        allocator.admit(1, 2 * BLOCK)
        allocator.free(1)
        finished(allocator, text((1, 8), (2, 4), (3, 4)))
        admission = looked_up(allocator, text((1, 8), (2, 9)))
        assert (admission.num_cached, admission.miss) == (12, MissReason.EVICTED)

    def test_memory_of_evictions_is_bounded_and_the_oldest_go_first(self):
        allocator = BlockAllocator(num_blocks=2, block_size=BLOCK)
        texts = [text((i, BLOCK + 1)) for i in range(2 * EVICTED_PER_BLOCK + 1)]
        for tokens in texts:
            finished(allocator, tokens[:-1])
            allocator.store.drop_idle()
        misses = [looked_up(allocator, tokens).miss for tokens in texts]
        assert misses == [MissReason.UNSEEN] + [MissReason.EVICTED] * 2 * EVICTED_PER_BLOCK
        allocator.check_integrity()


DAMAGES = {
    "hash lost": lambda c: c._by_hash.popitem(),
    "block lost": lambda c: c.by_block.pop(0),
    "prefix lost": lambda c: c._by_parent.popitem(),
    "prefix without blocks": lambda c: c._by_parent.__setitem__(b"no blocks", {}),
    "unknown sibling": lambda c: c._by_parent[b""].__setitem__(7, None),
    "known and evicted": lambda c: c._evicted.__setitem__(next(iter(c._by_hash)), None),
    "too many evicted": lambda c: c._evicted.update({bytes([i]): None for i in range(50)}),
}


class TestTrust:
    @pytest.mark.parametrize("other", [b"", b"b", b"a" * 100, chain_hash(b"", b"tokens")], ids=repr)
    def test_a_salt_keeps_tenants_apart(self, other):
        allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
        finished(allocator, list(range(20)), salt=b"a")
        assert allocator.cached_prefix(list(range(21)), salt=b"a") == 20
        assert allocator.cached_prefix(list(range(21)), salt=other) == 0

    def test_a_salt_that_is_another_texts_hash_opens_nothing(self):
        allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
        finished(allocator, list(range(16)))
        salt = chain_hash(root_hash(b""), token_bytes(list(range(8)), 0, 8))
        assert allocator.cached_prefix(list(range(8, 17)), salt=salt) == 0

    def test_a_colliding_hash_is_not_a_hit(self, monkeypatch: pytest.MonkeyPatch):
        for module in (prefix_cache, group_prefixes):
            monkeypatch.setattr(module, "chain_hash", lambda parent, tokens: b"same for all")
        allocator = BlockAllocator(num_blocks=4, block_size=4)
        finished(allocator, [1, 2, 3, 4])
        assert allocator.cached_prefix([1, 2, 3, 4, 5]) == 4
        assert allocator.cached_prefix([4, 3, 2, 1, 5]) == 0
        assert allocator.cached_prefix([1, 2, 3, 4, 5], salt=b"another") == 0

    def test_forgotten_prefixes_are_found_no_more_and_live_sequences_offer_nothing(self):
        allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
        tokens = list(range(12))
        finished(allocator, [50, *tokens])
        computed(allocator, 1, tokens)
        allocator.forget_prefixes()
        assert looked_up(allocator, [50, *tokens]).miss is MissReason.UNSEEN
        allocator.fork(1, 2)
        for seq_id in (1, 2):
            allocator.make_writable(seq_id, 12, 20)
            allocator.store.copies_done()
            allocator.register_prefix(seq_id, list(range(20)), 16)
            allocator.register_tail(seq_id, list(range(20)), 20)
            allocator.free(seq_id)
        assert allocator.store.num_idle == 0 and allocator.store.blocks_in_use == 0
        finished(allocator, tokens)
        assert looked_up(allocator, tokens).num_cached == 11

    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_check_integrity_sees_damage(self, damage):
        cache = PrefixCache(num_blocks=8, block_size=BLOCK, order=WorthOrder(8))
        content = token_bytes(list(range(8)), 0, 8)
        parent = chain_hash(b"", content)
        cache.register(0, b"", content, parent)
        cache.register(1, parent, token_bytes(list(range(5)), 0, 5))
        cache.check_integrity()
        damage(cache)
        with pytest.raises((AssertionError, KeyError)):
            cache.check_integrity()
