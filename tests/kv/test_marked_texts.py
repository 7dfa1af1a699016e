"""Marked texts are worth more for a time, which uses renew; they are no pins."""

import pytest

from mlx_paged.kv.eviction import WorthOrder
from tests.kv.test_eviction import CHAT, POOL, Pool
from tests.kv.test_pins import expire, own, retention


def mark(pool, text, seconds, now=0.0):
    retention(pool).mark(text, b"", seconds, now)


def test_a_marked_text_outlives_sweeps_until_its_time_is_over():
    pool = Pool()
    pool.say(CHAT)
    mark(pool, CHAT, 300.0)
    pool.sweep(4)
    assert pool.knows(CHAT) == len(CHAT)
    expire(pool, 299.0)
    pool.sweep(4)
    assert pool.knows(CHAT) == len(CHAT)
    expire(pool, 300.0)
    pool.sweep(2)
    assert pool.knows(CHAT) == 0


def test_what_comes_after_the_mark_is_worth_no_more():
    pool = Pool()
    pool.say(CHAT)
    mark(pool, CHAT[:16], 300.0)
    pool.sweep(4)
    assert pool.knows(CHAT) == 16


def test_a_use_renews_the_mark_from_then_on():
    pool = Pool()
    pool.say(CHAT)
    mark(pool, CHAT, 300.0)
    expire(pool, 200.0)
    pool.say([*CHAT, 1])
    expire(pool, 499.0)
    assert pool.allocator.store.idle.has_ends
    expire(pool, 500.0)
    assert not pool.allocator.store.idle.has_ends


def test_a_shorter_mark_does_not_end_a_longer_one():
    pool = Pool()
    pool.say(CHAT)
    mark(pool, CHAT, 3600.0)
    mark(pool, CHAT, 300.0, now=1.0)
    expire(pool, 3599.0)
    assert pool.allocator.store.idle.has_ends


def test_a_mark_is_no_pin():
    """Marked texts have no share of the pool that they keep, and one marks more than it holds."""
    pool = Pool()
    for i in range(1, 40):
        pool.say(own(i))
        mark(pool, own(i), 300.0)
    assert pool.allocator.store.idle.num_pinned == 0
    pool.say(own(99, POOL))
    assert pool.knows(own(99, POOL)) == POOL * 4


def test_a_conversation_stays_before_marked_texts_that_come_once():
    pool = Pool()
    for i in range(6):
        pool.say([*CHAT, i])
    for i in range(1, 12):
        pool.say(own(i))
        mark(pool, own(i), 300.0)
    assert pool.knows(CHAT) == len(CHAT)


@pytest.mark.parametrize("rounds", [50])
def test_marks_of_blocks_that_are_gone_take_no_memory(rounds):
    pool = Pool()
    for i in range(1, rounds):
        pool.say(own(i))
        mark(pool, own(i), 86400.0)
    order = pool.allocator.store.idle
    assert isinstance(order, WorthOrder) and len(order._marks) <= 2 * POOL + 64
