"""Which known content leaves the pool first: scans, conversations, ends of texts."""

import random

import pytest

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.cached_block import CachedBlock
from mlx_paged.kv.eviction import FOLLOWERS, HALF_LIFE, MOST_KEPT, WorthOrder
from mlx_paged.kv.frequency import ONE
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.worth import TOKENS, Pairs, TextWorth, Work

BLOCK = 4
POOL = 64


class Pool:
    """A pool to which texts come one after the other."""

    def __init__(self, num_blocks=POOL, **options):
        self.allocator = BlockAllocator(num_blocks, BLOCK, **options)
        self._next = 0

    def say(self, tokens):
        """A text comes and ends; returns how many of its tokens were known."""
        self._next += 1
        found = self.allocator.admit(self._next, len(tokens), tokens).num_cached
        for start in range(found, len(tokens), 8):
            self.allocator.make_writable(self._next, start, min(start + 8, len(tokens)))
            self.allocator.store.copies_done()
            self.allocator.register_prefix(self._next, tokens, start)
        self.allocator.register_tail(self._next, tokens, len(tokens))
        self.allocator.free(self._next)
        self.allocator.check_integrity()
        return found

    def sweep(self, pools, before=()):
        """One-off texts of 8 blocks, with as many blocks as so many pools."""
        for _ in range(pools * self.allocator.num_blocks // 8):
            self._next += 1
            own = [1000 * self._next + i for i in range(8 * BLOCK - len(before))]
            self.say([*before, *own])

    def knows(self, tokens):
        return self.allocator.cached_prefix([*tokens, -1])


CHAT = list(range(10 * BLOCK))


def test_a_sweep_of_texts_that_come_once_spares_what_was_used():
    pool = Pool()
    pool.say(CHAT[:20])
    assert pool.say(CHAT) == 20
    pool.sweep(10)
    assert pool.knows(CHAT) == len(CHAT)


def test_a_text_that_nobody_used_goes_with_the_sweep():
    pool = Pool()
    pool.say(CHAT)
    pool.sweep(1)
    assert pool.knows(CHAT) == 0


@pytest.mark.parametrize("system", [8, 10])  # whole blocks, and a part of one
def test_a_sweep_behind_a_prompt_that_the_chat_has_too(system):
    pool = Pool()
    pool.sweep(2, CHAT[:system])
    pool.say(CHAT[:20])
    pool.say(CHAT)
    pool.sweep(10, CHAT[:system])
    assert pool.knows(CHAT) == len(CHAT)
    written = [k for k in pool.allocator.store.prefixes[0].by_block.values() if not k.uses]
    assert len(written) > POOL / 2, "the sweep counts as used"


def test_what_returns_after_its_eviction_counts_as_used():
    pool = Pool()
    pool.say(CHAT)
    pool.sweep(10)
    assert pool.say([*CHAT, 1]) == 0
    pool.sweep(10)
    assert pool.knows(CHAT) > 0


def test_new_conversations_have_a_part_of_the_pool():
    pool = Pool()
    for i in range(20):
        begins = [100 * i + j for j in range(16)]
        pool.say(begins)
        pool.say([*begins, *(-1 - j for j in begins)])
    used = sum(k.uses > 0 for k in pool.allocator.store.prefixes[0].by_block.values())
    assert used >= MOST_KEPT * POOL
    pool.say(CHAT[: 6 * BLOCK])
    assert pool.say(CHAT) == 6 * BLOCK
    assert pool.knows(CHAT) == len(CHAT)


def test_a_conversation_that_has_ended_goes_at_last():
    pool = Pool()
    for length in range(4, 40, 2):
        pool.say(CHAT[:length])
    for i in range(200):
        begins = [100 + 100 * i + j for j in range(16)]
        pool.say(begins)
        pool.say([*begins, *(-1 - j for j in begins)])
    assert pool.knows(CHAT) == 0


def test_texts_are_evicted_from_their_ends():
    """Whatever comes, a known block's prefix is known too."""
    pool, rng = Pool(), random.Random(1)
    texts = [[rng.randrange(3) for _ in range(4)] for _ in range(4)]
    for _ in range(400):
        text = list(rng.choice(texts))
        text += [rng.randrange(10**6) for _ in range(rng.randrange(1, 24))]
        texts = [*texts[-12:], text[:40]]
        pool.say(text)
        (prefixes,) = pool.allocator.store.prefixes
        hashes = {known.hash for known in prefixes.by_block.values()}
        assert all(k.parent in hashes or not k.parent for k in prefixes.by_block.values())


def test_a_window_keeps_the_ends_of_texts():
    pool = Pool(POOL, groups=(LayerGroup(8),), chunk=8)
    pool.say(CHAT)
    pool.say([*CHAT, 7])
    pool.sweep(3)
    assert pool.knows(CHAT) == len(CHAT)


def test_a_smaller_pool_keeps_the_order():
    pool = Pool()
    pool.say(CHAT[:20])
    pool.say(CHAT)
    pool.sweep(1)
    pool.allocator.compact(POOL // 2)
    pool.allocator.check_integrity()
    pool.sweep(4)
    assert pool.knows(CHAT) == len(CHAT)
    pool.allocator.grow(POOL)
    pool.sweep(4)
    assert pool.knows(CHAT) == len(CHAT)


def test_so_many_followers_count_as_used():
    order, system = WorthOrder(POOL), CachedBlock(0, b"s", b"", b"", uses=5)
    texts = [CachedBlock(i, bytes([i]), b"s", b"") for i in range(1, 2 * FOLLOWERS + 2)]
    for text in texts[: FOLLOWERS + 1]:
        order.registered(text, system)
    assert [text.uses for text in texts[: FOLLOWERS + 1]] == [5] * FOLLOWERS + [0]
    order.used(texts[0], system)  # one of them goes on
    for text in texts[FOLLOWERS + 1 :]:
        order.registered(text, system)
    assert [text.uses for text in texts[FOLLOWERS + 1 :]] == [5] * (FOLLOWERS - 1) + [0]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_a_search_through_all_blocks(seed):
    """Random idle blocks in chains, against sorting all of them each time."""
    rng, order = random.Random(seed), WorthOrder(30)
    idle: dict[int, CachedBlock] = {}
    children: dict[int, set[int]] = {}
    parents: dict[int, int] = {}
    since: dict[int, int] = {}
    ranks: dict[int, float] = {}
    for step in range(400):
        free = [block for block in range(30) if block not in idle]
        if free and rng.random() < 0.6:
            known = CachedBlock(rng.choice(free), rng.randbytes(4), b"", b"")
            known.uses = rng.choice((-1, 0, 0, 1, 2, 9))
            known.score = ONE * rng.randrange(6) if known.uses > 0 else 0
            exponent = rng.randrange(5)
            known.worth = 1 << exponent
            before = rng.choice([None, *idle.values()])
            uses = known.uses
            order.registered(known, before)
            if before is not None:
                children.setdefault(before.block, set()).add(known.block)
                parents[known.block] = before.block
                since[before.block] = step  # as if it had become idle now
            assert known.uses >= uses
            order.add(known, is_followed=False)
            idle[known.block], since[known.block] = known, step + 0.5
            is_used = known.uses > 0
            ranks[known.block] = known.score / ONE + exponent if is_used else known.uses
        elif idle:
            used = [k for k in idle.values() if k.uses > 0]
            leaves = [k for block, k in idle.items() if not children.get(block)]
            first_used = len(used) > int(MOST_KEPT * 30)
            expected = min(
                leaves,
                key=lambda k: ((k.uses > 0) != first_used, ranks[k.block], since[k.block]),
            )
            block = order.next()
            assert block == expected.block
            order.remove(block)
            order.check_integrity()
            del idle[block]
            if (before := parents.pop(block, None)) is not None:
                children[before].discard(block)
                if not children[before]:
                    order.last_of_its_text(idle[before])


def test_texts_that_part_get_a_share_of_the_uses_of_what_they_have_in_common():
    order, system = WorthOrder(POOL), CachedBlock(0, b"s", b"", b"")
    texts = [CachedBlock(i, bytes([i]), b"s", b"") for i in range(1, 6)]
    order.registered(texts[0], system)
    for _ in range(8):
        order.used(system, None)
    for text in texts[1:5]:
        order.registered(text, system)
        order.used(text, system)
    later = CachedBlock(9, b"9", b"s", b"")
    order.registered(later, system)
    assert system.score == pytest.approx(3 * ONE, rel=0.01)
    assert later.score == pytest.approx(ONE, rel=0.03)  # one of four
    alone = CachedBlock(10, b"10", b"9", b"")
    order.registered(alone, later)
    assert alone.score == later.score


def test_a_use_counts_half_after_a_half_life():
    order = WorthOrder(POOL)
    early, twice, late = (CachedBlock(i, bytes([i]), b"", b"") for i in range(3))
    for known in (early, twice, twice):
        order.used(known, None)
    for known in (CachedBlock(9, b"9", b"", b""),) * (HALF_LIFE * POOL):
        order.add(known, is_followed=False)
        order.remove(order.next())
    order.used(late, None)
    assert late.score - early.score == pytest.approx(ONE, rel=1e-6)
    assert late.score == pytest.approx(twice.score, rel=1e-6)


def test_what_returns_counts_as_often_used_as_before():
    order = WorthOrder(POOL)
    known = CachedBlock(0, bytes(16), b"", b"")
    for _ in range(7):
        order.used(known, None)
    order.evicted(known)
    again = CachedBlock(1, bytes(16), b"", b"")
    order.registered(again, None)
    assert again.uses == 1 and again.score == pytest.approx(3 * ONE, rel=0.01)


def test_late_blocks_of_long_texts_stay_as_their_attention_takes_more():
    """Of two texts that are used as often, the end of the longer one is worth more."""
    long, short = CHAT, [-1 - token for token in CHAT[: 5 * BLOCK]]
    kept = []
    for work in (TOKENS.work, Work(1, (Pairs(None, 1),))):
        pool = Pool(20, worth=TextWorth(work, 1))
        for text in (long, short):
            pool.say(text[:-4])
            pool.say(text)
        other = [1000 + i for i in range(7 * BLOCK)]
        pool.say(other[:-4])
        pool.say(other)
        kept.append((pool.knows(long), pool.knows(short)))
    assert kept[0][0] < kept[1][0] == len(long) and kept[0][1] == len(short) > kept[1][1]
