"""Texts that callers pin, drop and forget: what stays, what goes, and what a pin must not do."""

import pytest

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.pins import MOST_PINNED, Pinned
from tests.kv.test_eviction import BLOCK, CHAT, POOL, Pool

FOREVER = float("inf")
SHARE = POOL // 4  # blocks that one owner may pin


def retention(pool):
    return pool.allocator.retention


def expire(pool, now):
    retention(pool).expire(lambda: now)
    pool.allocator.check_integrity()


def own(seed, blocks=6):
    return [10**6 * seed + i for i in range(blocks * BLOCK)]


def test_a_pinned_text_outlives_conversations_and_goes_when_its_time_is_over():
    pool = Pool()
    pool.say(CHAT)
    assert retention(pool).pin(CHAT, b"", 50.0) == Pinned(len(CHAT))
    for i in range(1, 30):
        pool.say(own(i))
        pool.say([*own(i), *own(100 + i, 1)])
    assert pool.knows(CHAT) == len(CHAT)
    expire(pool, 49.9)
    assert pool.allocator.store.idle.num_pinned == 10
    expire(pool, 50.0)
    assert pool.allocator.store.idle.num_pinned == 0
    pool.sweep(2)
    assert pool.knows(CHAT) == 0


def test_a_pin_makes_nothing_wait():
    """A text that needs the whole pool gets it; the pin that ends first goes first."""
    pool = Pool()
    for text, until in ((own(1), 90.0), (own(2), 10.0)):
        pool.say(text)
        retention(pool).pin(text, b"", until)
    pool.say(own(3, POOL - 8))  # all but 8 blocks, of which 6 stay pinned
    assert pool.knows(own(1)) == 6 * BLOCK and pool.knows(own(2)) < 3 * BLOCK
    pool.say(own(4, POOL))
    assert pool.allocator.store.idle.num_pinned == 0


def test_one_owner_cannot_pin_all_of_the_pool():
    pool = Pool()
    refused = []
    for i in range(1, 10):
        pool.say(own(i))
        refused.append(retention(pool).pin(own(i), b"", FOREVER))
    assert refused[:3] == [Pinned(24), Pinned(24), Pinned(4 * BLOCK, "max_pinned")]
    assert set(refused[3:]) == {Pinned(0, "max_pinned")}
    assert pool.allocator.store.idle.num_pinned == SHARE
    pool.say(CHAT)
    assert pool.say([*CHAT, 1]) == len(CHAT), "others have no place"


def test_many_salts_cannot_pin_all_of_the_pool():
    pool, found = Pool(), []
    for i in range(POOL):
        salt, text = bytes([i]), own(i, 2)
        allocator = pool.allocator
        allocator.admit(i, len(text), text, salt)
        allocator.register_tail(i, text, len(text))
        allocator.free(i)
        found.append(retention(pool).pin(text, salt, FOREVER))
    assert pool.allocator.store.idle.num_pinned == MOST_PINNED * POOL
    assert found[-1] == Pinned(0, "pool")
    pool.allocator.check_integrity()


def test_a_pin_is_renewed_and_ended():
    pool = Pool()
    pool.say(CHAT)
    for until in (10.0, 90.0, 20.0):
        assert retention(pool).pin(CHAT, b"", until) == Pinned(len(CHAT))
    assert pool.allocator.store.idle.num_pinned == 10
    expire(pool, 15.0)
    assert pool.allocator.store.idle.num_pinned == 10
    expire(pool, 20.0)
    assert pool.allocator.store.idle.num_pinned == 0


def test_what_is_not_known_is_not_pinned():
    pool = Pool()
    pool.say(CHAT[:20])
    assert retention(pool).pin(CHAT, b"", FOREVER) == Pinned(20, "not_cached")
    assert retention(pool).pin(CHAT, b"other", FOREVER) == Pinned(0, "not_cached")


def test_a_dropped_text_leaves_what_others_use():
    pool = Pool()
    pool.say([*CHAT[:16], 91, 92, 93, 94])
    pool.say(CHAT)  # begins with 4 blocks of the other
    assert retention(pool).drop(CHAT, b"") == len(CHAT) - 16
    assert pool.knows(CHAT) == 16 and pool.knows([*CHAT[:16], 91, 92, 93, 94]) == 20
    pool.allocator.check_integrity()


def test_what_a_later_text_found_is_not_dropped_but_forgotten():
    pool = Pool()
    pool.say(CHAT[:20])
    pool.say(CHAT)
    assert retention(pool).drop(CHAT[:20], b"") == 0
    assert retention(pool).drop(CHAT, b"") == len(CHAT) - 20
    assert pool.knows(CHAT) == 20
    assert retention(pool).forget(CHAT, b"") == 20
    assert pool.knows(CHAT) == 0 and pool.allocator.store.num_idle == 0


def test_what_a_sequence_holds_is_not_forgotten():
    pool = Pool()
    pool.say(CHAT)
    pool.allocator.admit(77, 22, CHAT[:22])
    pool.allocator.store.copies_done()
    assert retention(pool).forget(CHAT, b"") == len(CHAT) - 20
    assert pool.knows(CHAT) == 20
    assert retention(pool).forget_all(b"") == 0
    pool.allocator.check_integrity()
    pool.allocator.free(77)
    assert pool.knows(CHAT) == 20


def test_a_salt_is_forgotten_as_a_whole_and_no_other():
    allocator = BlockAllocator(POOL, BLOCK)
    for i, salt in enumerate((b"a", b"b", b"")):
        allocator.admit(i, 18, CHAT[:18], salt)
        allocator.register_tail(i, CHAT[:18], 18)
        allocator.free(i)
    assert allocator.retention.forget_all(b"a") == 5
    assert [allocator.cached_prefix(CHAT, salt) for salt in (b"a", b"b", b"")] == [0, 18, 18]
    allocator.check_integrity()


@pytest.mark.parametrize("windows", [(None, 8), (8,), (None, 8, 20)])
def test_all_layer_groups_are_pinned_and_forgotten_together(windows):
    groups = tuple(map(LayerGroup, windows))
    pool = Pool(POOL * len(groups), groups=groups, chunk=8)
    pool.say(CHAT)
    assert retention(pool).pin(CHAT, b"", FOREVER) == Pinned(len(CHAT))
    pinned = pool.allocator.store.idle.num_pinned
    assert pinned >= 2 * len(groups)
    pool.sweep(4)
    assert pool.knows(CHAT) == len(CHAT)
    assert retention(pool).forget(CHAT, b"") > 0
    pool.allocator.check_integrity()
    assert pool.knows(CHAT) < len(CHAT)


def test_pins_stay_where_the_pool_becomes_smaller():
    pool = Pool()
    pool.say(CHAT)
    retention(pool).pin(CHAT, b"", 9.0)
    pool.sweep(1)
    pool.allocator.compact(20)
    pool.allocator.check_integrity()
    assert pool.knows(CHAT) == len(CHAT) and pool.allocator.store.idle.num_pinned == 10
    expire(pool, 9.0)
    assert pool.allocator.store.idle.num_pinned == 0


def test_the_few_tokens_at_the_end_that_are_never_known_are_not_missed():
    allocator = BlockAllocator(POOL, 16)
    for i, length in enumerate(range(32, 36)):
        text = [1000 * i + j for j in range(length)]
        allocator.admit(i, length, text)
        allocator.register_tail(i, text, length)
        allocator.free(i)
        assert allocator.retention.pin(text, b"", FOREVER) == Pinned(32)
    assert allocator.retention.pin([*text, 1], b"", FOREVER) == Pinned(32, "not_cached")


def test_what_another_text_continues_is_not_forgotten():
    pool, other = Pool(), [*CHAT[:16], 91, 92, 93, 94]
    pool.say(other)
    pool.say(CHAT)
    assert retention(pool).forget(CHAT, b"") == len(CHAT) - 16
    assert pool.knows(other) == len(other)
