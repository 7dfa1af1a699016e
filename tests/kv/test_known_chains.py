"""Chains of known blocks, compared with the texts of which they were made."""

import random

import pytest

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.known_chains import chains, known_blocks
from mlx_paged.kv.worth import KIB, Pairs, TextWorth, Work

SIZE = 4


def with_texts(texts, salt=b"", held=(), **options):
    """An allocator that knows these texts; the sequences `held` are not freed."""
    allocator = BlockAllocator(64, SIZE, **options)
    for i, text in enumerate(texts):
        found = allocator.admit(i, len(text), text, salt).num_cached
        allocator.make_writable(i, found, len(text))
        allocator.register_prefix(i, text, len(text))
        allocator.store.copies_done()
        if i not in held:
            allocator.free(i)
    return allocator


def longest(allocator, salt=b"", most=100):
    return chains(known_blocks(allocator), salt, most, value=allocator.store.idle.value)


def test_a_chain_is_a_text_up_to_its_last_known_block():
    allocator = with_texts([[*range(12)], [*range(50, 58)]])
    count, found = longest(allocator)
    assert count == 2 and [each.tokens for each in found] == [12, 8]
    assert [each.shared_tokens for each in found] == [0, 0]


def test_what_two_texts_begin_with_is_shared():
    allocator = with_texts([[*range(12)], [*range(8), 90, 91, 92, 93]])
    _, found = longest(allocator)
    assert [(each.tokens, each.shared_tokens) for each in found] == [(12, 8)] * 2


def test_another_salt_sees_nothing():
    allocator = with_texts([[*range(12)]], b"mine")
    assert longest(allocator) == (0, []) == longest(allocator, b"others")
    assert longest(allocator, b"mine")[0] == 1


def test_at_most_so_many_are_told_and_all_are_counted():
    texts = [[10 * i + j for j in range(4 * (1 + i % 3))] for i in range(9)]
    count, found = longest(with_texts(texts), most=2)
    assert count == 9 and [each.tokens for each in found] == [12, 12]


def test_a_text_that_is_used_again_has_hits_and_what_is_held_is_in_use():
    allocator = with_texts([[*range(12)], [*range(12), 99], [*range(50, 58)]], held={2})
    by_tokens = {each.tokens: each for each in longest(allocator)[1]}
    assert by_tokens[12].hits > 0 == by_tokens[8].hits
    assert by_tokens[8].in_use and not by_tokens[12].in_use
    assert by_tokens[8].age == 0


def test_the_worth_of_a_chain_is_the_operations_that_a_kib_of_its_last_block_saves():
    worth = TextWorth(Work(100, (Pairs(None, 10),)), KIB // 4)
    texts = [[*range(12)], [*range(12), 99], [*range(12), 98], [*range(50, 58)]]
    allocator = with_texts(texts, worth=worth)
    by_tokens = {each.tokens: each for each in longest(allocator)[1]}
    assert by_tokens[8].worth == 0
    once = 4 * (4 * 100 + 10 * (9 + 10 + 11 + 12))
    assert by_tokens[12].worth == pytest.approx(2 * once, rel=0.01)
    allocator.retention.pin([*range(12)], b"", 1.0)
    assert longest(allocator)[1][0].worth == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_chains_of_random_texts_are_their_longest_prefixes(seed):
    rng = random.Random(seed)
    texts = []
    for _ in range(8):
        begin = rng.choice(texts)[: 4 * rng.randrange(4)] if texts and rng.random() < 0.6 else []
        texts.append([*begin, *(rng.randrange(1000) for _ in range(4 * rng.randrange(1, 4)))])
    allocator = with_texts(texts)
    whole = {tuple(text[: len(text) // SIZE * SIZE]) for text in texts}
    leaves = [t for t in whole if not any(o != t and o[: len(t)] == t for o in whole)]

    def shared(text):
        return max(
            (
                n
                for n in range(0, len(text), SIZE)
                for o in leaves
                if o != text and o[:n] == text[:n]
            ),
            default=0,
        )

    expected = sorted((len(text), shared(text)) for text in leaves)
    assert sorted((each.tokens, each.shared_tokens) for each in longest(allocator)[1]) == expected
