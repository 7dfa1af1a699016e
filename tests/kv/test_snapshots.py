"""Snapshots of recurrent states: where they are kept, how many, and what they are found for."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.prefix_cache import NoDependents
from mlx_paged.kv.prefix_match import PrefixMatch
from mlx_paged.kv.snapshots import Snapshot, Snapshots
from mlx_paged.kv.state_kind import Move, State
from mlx_paged.kv.states import StateIds
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import Span

BLOCK = 8


def make_allocator(num_blocks: int = 16, most: int = 8) -> BlockAllocator:
    return BlockAllocator(num_blocks, BLOCK, states=StateIds(most))


def finished(allocator: BlockAllocator, tokens: list[int], *positions: int) -> list[Snapshot]:
    """Let a sequence come and go that leaves its K/V, and states at these positions."""
    allocator.admit(-1, len(tokens), tokens)
    allocator.store.copies_done()
    allocator.register_tail(-1, tokens, len(tokens))
    for position in positions:
        allocator._sequence(-1).states.last_snapshot = None  # the positions have no order
        allocator.advance(-1, 0, position)
        allocator.keep_end(-1, tokens)
    allocator.free(-1)
    allocator.check_integrity()
    return list(allocator.states.snapshots._by_key.values())


def admitted(allocator: BlockAllocator, tokens: list[int]) -> PrefixMatch:
    """What a sequence with these tokens would find."""
    admission = allocator.admit(-2, len(tokens), tokens)
    allocator.store.copies_done()
    allocator.free(-2)
    allocator.check_integrity()
    return admission


class TestWhatIsFound:
    @pytest.mark.parametrize(
        ("positions", "prompt", "num_cached", "longer", "miss"),
        [
            ((), range(30), 0, 24, "no_state"),
            ((16,), range(30), 16, 24, "no_state"),
            ((16, 24), range(30), 24, 0, "no_state"),
            ((28,), range(30), 28, 0, None),
            ((16, 28), range(28), 16, 24, "no_state"),
            ((27,), range(28), 27, 0, None),
            ((16, 28), [*range(27), 99, 99], 16, 24, "no_state"),
            ((3, 16), [*range(12), 99, 99, 99], 3, 8, "no_state"),
            ((3, 11), [*range(12), 99, 99, 99], 11, 0, "diverged"),
            ((24,), [*range(24), 99, 99, 99], 24, 0, "diverged"),
            ((24,), [*range(24), 99, 99], 24, 0, None),
            ((28,), [*range(28), *range(50, 60)], 28, 0, "end"),
            ((8,), [99, 98, 97], 0, 0, "unseen"),
            ((8,), [0], 0, 0, "too_short"),
        ],
    )
    def test_ends_where_states_are_kept(self, positions, prompt, num_cached, longer, miss):
        allocator = make_allocator()
        known = finished(allocator, list(range(28)), *positions)
        admission = admitted(allocator, list(prompt))
        assert (admission.num_cached, admission.longer, admission.miss) == (
            num_cached,
            longer,
            miss,
        )
        assert admission.checkpoint in (known if num_cached else [None])
        assert admission.checkpoint is None or admission.checkpoint.position == num_cached

    def test_a_state_within_a_block_comes_with_a_copy_of_the_block(self):
        allocator = make_allocator()
        finished(allocator, list(range(13)), 13)
        admission = allocator.admit(1, 20, [*range(13), *range(50, 57)])
        assert admission.num_cached == 13 and len(admission.copies) == 1

    def test_a_longer_text_takes_over_what_its_beginning_left(self):
        """Whose own block is of no further use then, and the first to be evicted."""
        allocator = make_allocator(num_blocks=3)
        finished(allocator, list(range(11)), 11)
        finished(allocator, list(range(14)), 14)
        assert allocator.store.num_idle == 3
        admitted(allocator, [99])
        assert allocator.store.num_idle == 2
        assert admitted(allocator, [*range(11), 99]).num_cached == 11
        assert admitted(allocator, [*range(14), 99]).num_cached == 14

    def test_a_shorter_text_leaves_its_states_with_a_longer_one(self):
        allocator = make_allocator()
        finished(allocator, list(range(14)), 14)
        finished(allocator, list(range(11)), 11)
        assert admitted(allocator, [*range(11), 99]).num_cached == 11

    def test_a_text_that_ends_where_it_began_leaves_no_second_one(self):
        """Even if its state is now found in the block of a longer text."""
        allocator = make_allocator()
        finished(allocator, list(range(11)), 11)
        finished(allocator, list(range(14)), 14)
        prompt = [*range(11), 99]
        allocator.admit(1, len(prompt), prompt)
        allocator.store.copies_done()
        allocator.register_tail(1, prompt, 11)
        allocator.keep_end(1, prompt)
        allocator.free(1)
        allocator.check_integrity()
        assert sorted(s.position for s in allocator.states.snapshots._by_key.values()) == [11, 14]

    @pytest.mark.slow
    @given(
        texts=st.lists(
            st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 20)),
            max_size=8,
        ),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
    )
    def test_is_the_longest_beginning_with_a_state(self, texts, prompt):
        allocator = BlockAllocator(256, 3, states=StateIds(100))
        kept = set()
        for tokens, position in texts:
            position = min(position, len(tokens))
            finished(allocator, tokens, position)
            kept.add(tuple(tokens[:position]))
        lengths = [n for n in range(len(prompt)) if tuple(prompt[:n]) in kept]
        admission = admitted(allocator, prompt)
        assert admission.num_cached == max(lengths, default=0)


class TestBesideWindows:
    """A group that sees all tokens, and one that sees the last few."""

    GROUPS = LayerGroup(), LayerGroup(5, 2)

    def allocator(self, num_blocks: int, groups=GROUPS) -> BlockAllocator:
        return BlockAllocator(num_blocks, 4, groups, chunk=4, states=StateIds(100))

    def live(self, allocator: BlockAllocator, tokens: list[int], positions: set[int]) -> None:
        """Let a sequence come and go, in chunks of a block, that leaves states at positions."""
        start = allocator.admit(-1, len(tokens), tokens).num_cached
        while start < len(tokens):
            stop = min(start - start % 4 + 4, len(tokens))
            allocator.make_writable(-1, start, stop)
            allocator.store.copies_done()
            taken = [Snapshot(stop)] if stop in positions else []
            held = allocator._sequence(-1).states
            allocator.states.advance(held, start, stop, snapshots=taken)
            allocator.register_prefix(-1, tokens, stop)
            allocator.trim(-1, stop, offers=True)
            start = stop
        allocator.register_tail(-1, tokens, len(tokens))
        allocator.keep_end(-1, tokens)
        allocator.free(-1)
        allocator.check_integrity()

    @pytest.mark.parametrize("groups", [GROUPS, (LayerGroup(5),)])
    def test_a_state_is_found_as_long_as_its_window_is_known(self, groups):
        allocator = self.allocator(64, groups)
        text = list(range(38))
        self.live(allocator, text, {8, 16, 24})
        found = {n: admitted(allocator, [*text[:n], 99]).num_cached for n in (9, 17, 31, 38)}
        assert found == {9: 8, 17: 16, 31: 24, 38: 38}
        windowed = allocator.store.prefixes[-1]
        evicted = [cached for cached in windowed.by_block.values() if cached.tokens[0] in (12,)]
        for cached in evicted:  # the block before position 16, in the window of 16 and of 20
            allocator.store.free += allocator.store._drop(cached.block)
        assert len(evicted) == 1
        found = {n: admitted(allocator, [*text[:n], 99]).num_cached for n in (9, 17, 31, 38)}
        assert found == {9: 8, 17: 8, 31: 24, 38: 38}

    @pytest.mark.slow
    @settings(deadline=None)
    @given(
        texts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), max_size=6),
        positions=st.sets(st.sampled_from([4, 8, 12, 16, 20])),
        num_blocks=st.sampled_from([24, 40, 400]),
    )
    def test_is_the_longest_beginning_with_a_state_and_its_windows(
        self, texts, positions, num_blocks
    ):
        allocator = self.allocator(num_blocks)
        ends = set[tuple[int, ...]]()
        for tokens in texts:
            found = admitted(allocator, tokens).num_cached
            if num_blocks == 400:  # nothing is evicted
                known = [n for n in range(len(tokens)) if tuple(tokens[:n]) in ends]
                assert found == max(known, default=0)
            self.live(allocator, tokens, positions)
            ends |= {tuple(tokens[:n]) for n in positions if n <= len(tokens)} | {tuple(tokens)}


class TestHowManyAreKept:
    def test_the_one_unused_longest_goes_first(self):
        snapshots = Snapshots(3)
        for block in range(3):
            snapshots.add(block, BLOCK, Snapshot(BLOCK))
        snapshots.use(snapshots.get(0, BLOCK))
        snapshots.add(3, BLOCK, Snapshot(BLOCK))
        assert [block for block in range(4) if block in snapshots] == [0, 2, 3]

    def test_asking_what_is_known_is_no_use(self):
        allocator, tokens = make_allocator(num_blocks=4), list(range(20))
        (known,) = finished(allocator, tokens, 8)
        with pytest.raises(OutOfBlocksError):
            allocator.admit(-2, 20, tokens, spare=9)
        assert (allocator.cached_prefix(tokens), known.uses) == (8, 0)
        assert admitted(allocator, tokens).checkpoint is known and known.uses == 1

    def test_those_that_save_few_tokens_go_first(self):
        """Unless they are used, often or lately."""
        snapshots = Snapshots(3)
        kept = [Snapshot(position) for position in (100, 130, 90)]
        kept[1].before = kept[0]  # saves 30
        for block, snapshot in enumerate(kept):
            snapshots.add(block, BLOCK, snapshot)
        snapshots.add(3, BLOCK, Snapshot(55))
        assert [block for block in range(4) if block in snapshots] == [0, 2, 3]
        snapshots.use(snapshots.get(3, BLOCK))  # it now counts 30 + 2 * 55
        snapshots.add(4, BLOCK, Snapshot(70))
        assert [block for block in range(5) if block in snapshots] == [0, 3, 4]

    def test_what_saves_nothing_beyond_another_saves_more_without_it(self):
        snapshots = Snapshots(2)
        first = Snapshot(50)
        second = Snapshot(58, before=first)
        snapshots.add(0, BLOCK, first)
        snapshots.add(1, BLOCK, second)
        assert second.value == 8
        snapshots.forget(0)
        assert second.value == 58 and second.before is None

    def test_new_ones_replace_valuable_ones_in_the_end(self):
        snapshots = Snapshots(1)
        snapshots.add(0, BLOCK, Snapshot(90))
        kept = [snapshots.add(n, BLOCK, Snapshot(40)) for n in (1, 2, 3)]
        assert kept == [False, False, True]

    def test_a_spare_one_takes_nobodys_place_and_gives_its_own(self):
        snapshots = Snapshots(2)
        assert snapshots.add(0, BLOCK, Snapshot(BLOCK))
        assert snapshots.add(1, BLOCK, Snapshot(BLOCK, is_spare=True))
        assert not snapshots.add(2, BLOCK, Snapshot(BLOCK, is_spare=True))
        assert snapshots.add(3, BLOCK, Snapshot(BLOCK))
        assert [block for block in range(4) if block in snapshots] == [0, 3]

    def test_a_second_one_of_the_same_place_is_not_wanted(self):
        snapshots = Snapshots(2)
        first = Snapshot(BLOCK)
        assert snapshots.add(0, BLOCK, first)
        assert not snapshots.add(0, BLOCK, Snapshot(BLOCK))
        assert snapshots.get(0, BLOCK) is first and len(snapshots) == 1

    def test_one_goes_with_its_block(self):
        allocator = make_allocator(num_blocks=4)
        finished(allocator, list(range(28)), 8, 16, 28)
        admitted(allocator, [99] * 15)  # takes the two blocks that were unused longest
        assert len(allocator.states.snapshots) == 2
        allocator.store.drop_idle()
        assert len(allocator.states.snapshots) == 0

    def test_none_survives_a_fault(self):
        allocator = make_allocator()
        finished(allocator, list(range(28)), 8, 16, 28)
        allocator.admit(1, 30, list(range(30)))
        allocator.forget_prefixes()
        assert (len(allocator.states.snapshots), allocator.states.snapshots.max_snapshots) == (0, 8)
        allocator.advance(1, 0, 24)
        allocator.keep_end(1, list(range(30)))
        assert len(allocator.states.snapshots) == 0
        allocator.check_integrity()

    def test_at_least_one(self):
        message = r"max_snapshots is 0: expected an integer >= 1"
        with pytest.raises(ValueError, match=message):
            Snapshots(0)


def blocks_forgotten_alone(allocator: BlockAllocator) -> None:
    (prefixes,) = allocator.store.prefixes
    prefixes.dependents = NoDependents()
    prefixes.forget(next(iter(prefixes)))


def too_many(allocator: BlockAllocator) -> None:
    allocator.states.snapshots.max_snapshots = 1


def past_its_block(allocator: BlockAllocator) -> None:
    block, _ = next(iter(allocator.states.snapshots._by_key))
    allocator.states.snapshots.add(block, BLOCK + 1, Snapshot(BLOCK + 1))


def at_another_position(allocator: BlockAllocator) -> None:
    next(iter(allocator.states.snapshots._by_key.values())).position += 1


def twice(allocator: BlockAllocator) -> None:
    key, _ = allocator.states.snapshots._by_key.popitem()
    allocator.states.snapshots._by_key[key] = next(
        iter(allocator.states.snapshots._by_key.values())
    )


def lost(allocator: BlockAllocator) -> None:
    allocator.states.snapshots._by_key.popitem()


@pytest.mark.parametrize(
    "damage",
    [blocks_forgotten_alone, too_many, past_its_block, at_another_position, twice, lost],
    ids=lambda damage: damage.__name__,
)
def test_damaged_books_are_noticed(damage):
    allocator = make_allocator()
    finished(allocator, list(range(20)), 8, 16)
    damage(allocator)
    with pytest.raises(AssertionError, match="snapshot"):
        allocator.check_integrity()


class TestWhereTheyAreTaken:
    @staticmethod
    def spans(
        num_prompt: int, prefill_chunk: int, most: int = 100, turn_ends=(), **options
    ) -> list[tuple[Span, list[Snapshot]]]:
        """The spans that compute a prompt, each with the snapshots on the way."""
        allocator = BlockAllocator(64, BLOCK, states=StateIds(most))
        scheduler = Scheduler(allocator, 4, prefill_chunk, **options)
        request = Request(0, list(range(num_prompt)), SamplingParams(max_tokens=40), seed=0)
        request.turn_ends = turn_ends
        scheduler.add(request)
        spans = []
        while request.num_computed < num_prompt:
            (span,) = scheduler.schedule().spans
            planned = allocator._sequence(0).states.planned
            spans.append((span, [s for s in planned if s.position > span.start]))
            left = [state.position for state in span.leaves]
            assert left == sorted({*[s.position for s in spans[-1][1]], span.stop})
        return spans

    @staticmethod
    def taken(spans: list[tuple[Span, list[Snapshot]]]) -> list[tuple[int, list[int]]]:
        return [(span.stop, [s.position for s in snapshots]) for span, snapshots in spans]

    @pytest.mark.parametrize(
        ("num_prompt", "expected"),
        [
            (7, [(7, [])]),
            (8, [(8, [])]),
            (9, [(9, [8])]),
            (16, [(16, [8])]),
            (17, [(17, [16])]),
            (20, [(20, [16])]),
            (50, [(24, []), (50, [48])]),
            (70, [(24, []), (48, [32]), (70, [64])]),
        ],
    )
    def test_after_the_last_whole_block_and_at_the_ends_of_chunks(self, num_prompt, expected):
        spans = self.spans(num_prompt, prefill_chunk=27)
        assert self.taken(spans) == expected
        spare = [s.position for _, snapshots in spans for s in snapshots if s.is_spare]
        assert spare == ([32] if num_prompt == 70 else [])

    def test_at_the_ends_of_turns_instead_of_the_last_block(self):
        spans = self.spans(100, prefill_chunk=67, turn_ends=(19, 95, 97))
        assert self.taken(spans) == [(64, [16, 64]), (100, [88, 96])]
        (first, spare), (last, _) = (snapshots for _, snapshots in spans)
        assert spare.before is first and last.before is spare and spare.is_spare
        assert first.before is None and not first.is_spare

    def test_chunks_smaller_than_a_block_advance_all_the_same(self):
        spans = self.spans(20, prefill_chunk=5), self.spans(6, prefill_chunk=1)
        stops = [[span.stop for span, _ in of_prompt] for of_prompt in spans]
        assert stops == [[5, 8, 13, 16, 20], [1, 2, 3, 4, 5, 6]]

    def test_not_of_decodes(self):
        spans = self.spans(9, prefill_chunk=32)
        request = spans[0][0].request
        allocator = BlockAllocator(64, BLOCK, states=StateIds(4))
        scheduler = Scheduler(allocator, 4, 32)
        request.num_computed = 0
        scheduler.add(request)
        scheduler.schedule()
        for _ in range(20):
            request.tokens.append(1)
            (span,) = scheduler.schedule().spans
            assert len(span) == 1 and len(span.leaves) == 1

    def test_nowhere_without_a_prefix_cache(self):
        spans = self.spans(50, prefill_chunk=27, prefix_cache=False)
        assert self.taken(spans) == [(27, []), (50, [])]

    def test_a_span_is_cut_at_the_states_that_it_leaves(self):
        request = Request(0, list(range(30)), SamplingParams(), seed=0)
        leaves = State(6, 8), State(7, 24), State(8, 30)
        fork = Request(1, list(range(30)), SamplingParams(), seed=0)
        move = Move(State(5, 3), leaves)
        pieces = Span.of(request, 3, 30, True, move, (fork,)).pieces()
        assert [(p.start, p.stop, p.samples, p.forks) for p in pieces] == [
            (3, 8, False, ()),
            (8, 24, False, ()),
            (24, 30, True, (fork,)),
        ]
        assert [(p.reads, p.leaves) for p in pieces] == [
            (5, leaves[:1]),
            (6, leaves[1:2]),
            (7, leaves[2:]),
        ]
        (whole,) = Span.of(request, 3, 24, False, Move(State(5, 3), leaves[1:2])).pieces()
        assert (whole.start, whole.stop, whole.leaves) == (3, 24, leaves[1:2])


class TestOnTheWay:
    @staticmethod
    def positions(num_tokens: int, chunk: int, block: int, most: int, turn_end: int) -> list[int]:
        """Of all snapshots that a prompt leaves which is computed in chunks."""
        allocator = BlockAllocator(num_tokens, block, states=StateIds(most))
        scheduler = Scheduler(allocator, 4, chunk)
        request = Request(0, list(range(num_tokens)), SamplingParams(max_tokens=9), seed=0)
        request.turn_ends = (turn_end,)
        scheduler.add(request)
        found = list[int]()
        while request.num_computed < num_tokens:
            (span,) = scheduler.schedule().spans
            planned = allocator._sequence(0).states.planned
            found += [each.position for each in planned if each.position > span.start]
        return found

    @pytest.mark.parametrize(("chunk", "block"), [(512, 16), (2048, 16), (300, 16), (512, 8)])
    def test_any_beginning_of_a_prompt_has_a_state_near_its_end(self, chunk, block):
        """Of at least 960 tokens: the state is after 95 % of it, but for one block."""
        states = self.positions(9000, chunk, block, 128, turn_end=7900)
        for length in range(960, 9000):
            latest = max(each for each in states if each <= length)
            assert latest >= 0.95 * length - block
        gaps = [b - a for a, b in pairwise(s for s in states if s % chunk)]
        assert len(states) < 20 * math.log(9000 / 960) + 20 + 9000 / chunk and min(gaps) >= 24

    def test_few_snapshots_are_further_apart(self):
        counts = [len(self.positions(9000, 512, 16, most, turn_end=7900)) for most in (64, 16, 4)]
        assert counts[0] < 45 and counts[1] < 20 and counts[2] < 10

    def test_they_leave_before_what_turns_end_with(self):
        snapshots, before = Snapshots(4), None
        for block, (position, is_spare) in enumerate([(48, 1), (96, 1), (400, 0), (448, 1)]):
            before = Snapshot(position, bool(is_spare), before=before)
            assert snapshots.add(block, BLOCK, before)
        assert snapshots.add(4, BLOCK, Snapshot(500, before=before))
        assert 2 in snapshots and 4 in snapshots

    def test_room_is_made_for_all_that_a_chunk_leaves(self):
        snapshots, before = Snapshots(4), None
        for block in range(4):
            assert snapshots.add(block, BLOCK, Snapshot(80, is_spare=True))
        planned = list[Snapshot]()
        for position in (400, 800, 1200):
            before = Snapshot(position, is_spare=True, before=before)
            assert snapshots.make_room(before, len(planned))
            planned.append(before)
            assert len(snapshots) + len(planned) == 4
        assert not snapshots.make_room(Snapshot(1201, is_spare=True, before=before), 3)

    def test_a_text_that_is_in_use_keeps_all_that_it_has(self):
        """Its first snapshots do not age while later ones are used."""
        snapshots = Snapshots(3)
        first = Snapshot(160, is_spare=True)
        second = Snapshot(400, before=first)
        snapshots.add(0, BLOCK, first)
        snapshots.add(1, BLOCK, second)
        for block in range(2, 40):
            snapshots.add(block, BLOCK, Snapshot(150, is_spare=True))
            snapshots.use(second)
        assert 0 in snapshots and 1 in snapshots

    def test_where_its_text_has_gone_on_it_counts_less(self):
        """Unless several texts have gone on from there."""
        snapshots = Snapshots(3)
        first = Snapshot(100)
        second = Snapshot(200, before=first)
        snapshots.add(0, BLOCK, first)
        snapshots.use(first)
        snapshots.add(1, BLOCK, second)
        assert not first.is_spare
        snapshots.use(second)
        assert first.is_spare and first.value < 100
        snapshots.use(first)
        snapshots.use(second)
        assert not first.is_spare and first.value == 300


def test_a_state_of_two_snapshots_is_kept_until_both_are_dropped():
    snapshots = Snapshots(4)
    for block in (1, 2):
        assert snapshots.add(block, BLOCK, Snapshot(BLOCK, state=7))
    for block in (1, 2):
        assert snapshots.has_state(7)
        snapshots.forget(block)
        snapshots.check_integrity({1: BLOCK, 2: BLOCK}, BLOCK)
    assert not snapshots.has_state(7)


def test_new_numbers_of_blocks_keep_the_states():
    snapshots = Snapshots(4)
    assert snapshots.add(1, BLOCK, Snapshot(BLOCK, state=7))
    snapshots.renumber({1: 0})
    snapshots.check_integrity({0: BLOCK}, BLOCK)
    snapshots.forget(0)
    assert not snapshots.has_state(7)
