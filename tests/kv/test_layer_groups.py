"""Layer groups: which layers share arrays, and what their sequences hold and find again."""

from collections import Counter

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.kv.layer_groups import ONE_GROUP, LayerGroup, plan_pool
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv.prefix_cache import PrefixCache
from mlx_paged.kv.prefix_match import MissReason
from mlx_paged.kv.shapes import KVShape
from mlx_paged.kv.states import StateIds

SMALL, LARGE = KVShape(2, 8, 8, mx.float16), KVShape(2, 16, 16, mx.float16)
SIZE = 4
WINDOW = 8
FULL_AND_WINDOWED = LayerGroup(None, 1), LayerGroup(WINDOW, 2)


def layers(pattern: str) -> tuple[list[KVShape | None], list[int | None]]:
    """Shapes and windows of layers: f full, w windowed, W windowed and large, - stores nothing."""
    shapes = {"f": SMALL, "w": SMALL, "W": LARGE, "-": None}
    windows = {"f": None, "w": WINDOW, "W": WINDOW, "-": 0}
    return [shapes[c] for c in pattern], [windows[c] for c in pattern]


class TestPlan:
    @pytest.mark.parametrize(
        ("pattern", "num_arrays", "groups"),
        [
            ("fff", 3, ONE_GROUP),
            ("ww", 2, (LayerGroup(WINDOW),)),
            ("f-f", 2, ONE_GROUP),
            ("fwfw", 2, (LayerGroup(), LayerGroup(WINDOW))),
            ("wwwwwf", 1, (LayerGroup(), LayerGroup(WINDOW, 5))),
            ("wwwwfwwwwf", 2, (LayerGroup(), LayerGroup(WINDOW, 4))),
            ("wwwff", 1, (LayerGroup(None, 2), LayerGroup(WINDOW, 3))),
            ("WfW", 2, (LayerGroup(), LayerGroup(WINDOW, 2, 2))),
        ],
    )
    def test_layers_of_a_window_are_a_group_and_groups_share_arrays(
        self, pattern, num_arrays, groups
    ):
        plan = plan_pool(*layers(pattern), block_size=16)
        assert plan.groups == groups and len(plan.arrays) == num_arrays
        assert [place is None for place in plan.places] == [c == "-" for c in pattern]

    @given(st.text("fwW-", min_size=1, max_size=40), st.sampled_from([5, 8, 16]))
    def test_every_layer_has_its_own_blocks_and_nothing_is_padding(self, pattern, block_size):
        shapes, windows = layers(pattern)
        plan = plan_pool(shapes, windows, block_size)
        places = [place for place in plan.places if place is not None]
        assert len(set(places)) == len(places) == sum(c != "-" for c in pattern)
        for place, shape in zip(plan.places, shapes, strict=True):
            assert place is None or plan.arrays[place.array].shape == shape
        num_bytes = block_size * sum(s.token_bytes for s in shapes if s is not None)
        of_memory = {a.memory: a.block_size * a.shape.token_bytes for a in plan.arrays}
        assert sum(of_memory.values()) * plan.width == num_bytes or not places

    @pytest.mark.parametrize(
        ("shapes", "block_size"),
        [
            ([SMALL, LARGE], 5),
            ([SMALL, KVShape(3, 8, 8, mx.float16)], 16),
            ([SMALL, KVShape(2, 8, 8, mx.float32)], 16),
            ([SMALL, KVShape(2, 16, 8, mx.float16)], 16),
            ([KVShape(1, 16, 12, mx.float16, latent=True), SMALL], 16),
        ],
        ids=["odd block size", "one and a half", "dtypes", "keys only", "latents"],
    )
    def test_layers_that_cannot_share_arrays_keep_what_any_of_them_sees(self, shapes, block_size):
        plan = plan_pool(shapes, [None, WINDOW], block_size)
        assert plan.groups == ONE_GROUP and len(plan.arrays) == 2
        assert plan_pool(shapes, [2 * WINDOW, WINDOW], block_size).groups == (LayerGroup(16),)

    def test_views_of_one_memory_hold_the_same_bytes(self):
        plan = plan_pool(*layers("fW"), block_size=16)
        pool = KVPool((), 6, 16, plan)
        assert [k.shape for k in pool.k] == [(2, 6, 16, 8), (2, 6, 8, 16)]
        assert pool.nbytes == 6 * pool.block_bytes == pool.k[0].nbytes + pool.v[0].nbytes
        rows = mx.arange(8 * 2 * 16, dtype=mx.float32).astype(mx.float16).reshape(8, 2, 16)
        pool.write(1, rows, -rows, mx.arange(8, dtype=mx.int32) + 8 * 3)
        mx.eval(pool.handles())
        (as_small,) = (pool.k[0][:, 3].flatten() for _ in range(1))
        assert sorted(as_small.tolist()) == sorted(rows.flatten().tolist())


def grown(allocator: BlockAllocator, seq_id: int, tokens: list[int], chunk: int) -> int:
    """Compute a prompt in chunks, as a scheduler does; the most blocks in use."""
    start, most = allocator.admit(seq_id, len(tokens), tokens).num_cached, 0
    allocator.store.copies_done()
    while start < len(tokens):
        stop = min(len(tokens), start + chunk)
        allocator.make_writable(seq_id, start, stop)
        allocator.advance(seq_id, start, stop)
        allocator.store.copies_done()
        most = max(most, allocator.store.blocks_in_use)
        allocator.register_prefix(seq_id, tokens, stop)
        allocator.trim(seq_id, stop, offers=True)
        allocator.check_integrity()
        start = stop
    return most


class TestSequences:
    @pytest.mark.slow
    @settings(max_examples=150, deadline=None)
    @given(
        num_tokens=st.integers(1, 90),
        window=st.integers(1, 30),
        chunk=st.integers(1, 40),
        members=st.integers(1, 3),
        pieces=st.sampled_from([1, 2]),
        num_more=st.integers(0, 20),
        num_known=st.integers(0, 90),
        recurrent=st.booleans(),
    )
    def test_a_pool_of_its_largest_need_is_enough_for_a_sequence(
        self, num_tokens, window, chunk, members, pieces, num_more, num_known, recurrent
    ):
        groups = [LayerGroup(window, members, pieces)] + [LayerGroup()] * (not recurrent)
        largest = BlockAllocator(1, SIZE, groups, chunk).max_blocks(num_tokens + num_more)
        allocator = BlockAllocator(largest, SIZE, groups, chunk, StateIds(1) if recurrent else None)
        tokens = list(range(num_tokens + num_more))
        known = tokens[: min(num_known, num_tokens)]
        grown(allocator, 1, known, chunk)
        allocator.register_tail(1, known, len(known))
        if recurrent and known:
            allocator.keep_end(1, known)
        allocator.free(1)
        grown(allocator, 0, tokens[:num_tokens], chunk)
        for position in range(num_tokens, len(tokens)):
            allocator.make_writable(0, position, position + 1)
            allocator.advance(0, position, position + 1)
            allocator.register_prefix(0, tokens, position + 1)
            allocator.trim(0, position + 1, offers=True)
        allocator.check_integrity()
        held = {len(allocator.table(0, group)) for group in range(len(groups))}
        assert held == {allocator.blocks_needed(len(tokens))}

    def test_blocks_behind_the_window_go_within_the_chunks_of_a_prompt(self):
        allocator = BlockAllocator(1000, SIZE, FULL_AND_WINDOWED, chunk=12)
        most = grown(allocator, 0, list(range(400)), chunk=12)
        assert allocator.store.blocks_in_use == 100 + 2 * (WINDOW // SIZE)
        assert most <= 100 + 2 * ((WINDOW + 12) // SIZE + 1)

    def test_groups_use_blocks_that_others_gave_back(self):
        allocator = BlockAllocator(12, SIZE, FULL_AND_WINDOWED, chunk=16)
        allocator.admit(0, 16)  # 4 entries of one block, and as many of two
        assert allocator.store.num_available == 0
        with pytest.raises(OutOfBlocksError, match="3 KV blocks needed, 0 available"):
            allocator.make_writable(0, 16, 17)
        allocator.trim(0, 16)
        assert allocator.store.num_available == 4
        allocator.make_writable(0, 16, 17)
        assert allocator.store.num_available == 1
        allocator.check_integrity()

    def test_a_fork_keeps_what_its_parent_lets_go(self):
        allocator = BlockAllocator(100, SIZE, FULL_AND_WINDOWED, chunk=32)
        allocator.admit(0, 32)
        allocator.fork(0, 1)
        allocator.trim(0, 32)
        assert allocator.store.blocks_in_use == 24
        assert allocator.can_continue(1, 3) and not allocator.can_continue(0, 3)
        assert allocator.can_continue(0, 31)
        copies = allocator.make_writable(1, 31, 32)
        assert Counter(copy.group for copy in copies) == {0: 1, 1: 2}
        allocator.store.copies_done()
        allocator.free(0)
        allocator.free(1)
        allocator.check_integrity()
        assert allocator.store.blocks_in_use == 0

    def test_nothing_is_written_before_the_window(self):
        allocator = BlockAllocator(100, SIZE, FULL_AND_WINDOWED, chunk=32)
        allocator.admit(0, 32)
        allocator.trim(0, 32)
        with pytest.raises(AssertionError, match="the block was released"):
            allocator.make_writable(0, 3, 4)
        with pytest.raises(AssertionError, match="the block was released"):
            allocator.truncate(0, 4)


class TestPrefixes:
    TOKENS = tuple(range(100, 140))

    def ended(self, num_blocks: int = 100) -> BlockAllocator:
        """An allocator in which a sequence of TOKENS has ended."""
        allocator = BlockAllocator(num_blocks, SIZE, FULL_AND_WINDOWED, chunk=12)
        grown(allocator, 0, self.TOKENS, chunk=12)
        allocator.register_tail(0, self.TOKENS, len(self.TOKENS))
        allocator.free(0)
        return allocator

    def without_windowed(self, allocator: BlockAllocator, *indices: int) -> None:
        """Evict the windowed group's cached blocks with these indices."""
        prefixes = allocator.store.prefixes[1]
        for index in indices:
            first = self.TOKENS[index * SIZE]
            (block,) = [
                block
                for block in prefixes
                if prefixes.by_block[block].tokens.startswith(first.to_bytes(8, "little"))
            ]
            allocator.store.free += allocator.store._drop(block)
        allocator.check_integrity()

    def test_a_hit_holds_the_last_window_only(self):
        allocator = self.ended()
        admission = allocator.admit(1, 44, [*self.TOKENS, 1, 2, 3, 4])
        assert admission.num_cached == 40 and not admission.copies
        entries = allocator._sequence(1).first_entries
        assert entries == [0, (40 - WINDOW) // SIZE]
        held = 11 + 2 * (11 - entries[1])
        assert allocator.store.blocks_in_use == held
        allocator.check_integrity()

    def test_a_hit_does_not_need_what_the_window_has_left(self):
        allocator = self.ended()
        self.without_windowed(allocator, *range(8))
        assert allocator.cached_prefix([*self.TOKENS, 1]) == 40
        missed = allocator.admit(1, 37, [*self.TOKENS[:36], 1])
        assert (missed.num_cached, missed.miss) == (0, MissReason.EVICTED)

    @pytest.mark.parametrize(("gone", "found"), [(9, 36), (8, 32), (7, 40), (5, 40)])
    def test_a_hit_ends_where_the_window_is_whole(self, gone, found):
        allocator = self.ended()
        self.without_windowed(allocator, gone)
        assert allocator.cached_prefix([*self.TOKENS, 1]) == found

    def test_a_prompt_that_diverges_behind_the_window_finds_what_was_offered_there(self):
        allocator = self.ended()
        other = [*self.TOKENS[:18], 1, 2, 3, 4, 5]
        admission = allocator.admit(1, len(other), other)
        assert admission.num_cached == 18
        assert Counter(copy.group for copy in admission.copies) == {0: 1, 1: 2}
        assert allocator._sequence(1).first_entries == [0, (16 - WINDOW) // SIZE]

    def test_windows_alone_find_a_prefix_whose_start_is_gone(self):
        allocator = BlockAllocator(100, SIZE, (LayerGroup(WINDOW),), chunk=12)
        grown(allocator, 0, self.TOKENS, chunk=12)
        allocator.register_tail(0, self.TOKENS, 40)
        allocator.free(0)
        for _ in range(7):  # the oldest
            allocator.store.free += allocator.store._drop(next(iter(allocator.store.idle)))
        assert allocator.cached_prefix([*self.TOKENS, 1]) == 40
        assert allocator.admit(1, 41, [*self.TOKENS, 1]).num_cached == 40
        allocator.check_integrity()

    def test_a_search_looks_at_each_block_a_few_times_at_most(self, monkeypatch):
        tokens = list(range(4 * 200))
        allocator = BlockAllocator(2000, SIZE, FULL_AND_WINDOWED, chunk=len(tokens))
        grown(allocator, 0, tokens, chunk=len(tokens))
        allocator.free(0)
        windowed = allocator.store.prefixes[1]
        for block in [b for b in allocator.store.idle if b in windowed]:
            allocator.store.free += allocator.store._drop(block)
        looked = Counter()
        find = PrefixCache.find
        monkeypatch.setattr(
            PrefixCache, "find", lambda self, *key: looked.update([key]) or find(self, *key)
        )
        assert allocator.cached_prefix(tokens) == 0
        assert max(looked.values()) <= 3

    def test_the_last_idle_tails_are_taken_where_no_block_is_left_to_copy_them(self):
        tokens = self.TOKENS[:6]
        allocator = BlockAllocator(6, SIZE, FULL_AND_WINDOWED)
        allocator.admit(0, 6)
        allocator.register_tail(0, tokens, 6)
        allocator.free(0)
        assert allocator.store.num_idle == 6
        admission = allocator.admit(1, 8, [*tokens, 1, 2])
        assert (admission.num_cached, admission.copies) == (6, [])
        assert allocator.store.num_available == 0
        allocator.check_integrity()


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a.store.free.append(int(a.store._blocks[1][1, a.table(0, 1)[0]])),
        lambda a: a.store._blocks[1].__setitem__((1, int(a.table(0, 1)[0])), 0),
        lambda a: a._sequences[0].first_entries.__setitem__(1, 1),
        lambda a: a.block_tables.extend(a._sequences[0].row, [9], 1),
        lambda a: setattr(a.store, "num_idle", 1),
    ],
    ids=["half free", "shared", "let go", "table too long", "miscounted"],
)
def test_check_integrity_sees_damage(damage):
    allocator = BlockAllocator(20, SIZE, FULL_AND_WINDOWED)
    allocator.admit(0, 8)
    allocator.check_integrity()
    damage(allocator)
    with pytest.raises(AssertionError):
        allocator.check_integrity()
