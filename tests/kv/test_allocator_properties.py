"""Random histories of an allocator, with a model of the memory it manages."""

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockCopy, OutOfBlocksError
from mlx_paged.kv.layer_groups import LayerGroup

MAX_TOKENS = 20
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_TOKENS)

Place = tuple[int, int]  # a block of the pool, and an offset in it
Content = tuple[int, int, tuple[int, ...]]  # layer group, member, tokens up to its position


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences write into simulated slots; whatever happens, each must read its own back.

    What is written at a position stands for K/V: it depends on all tokens up to there. There are
    few distinct tokens, so that prefixes are often shared. As in an engine, several changes make a
    step; then its copies are performed, in any order, and then its writes.
    """

    sequences = Bundle("sequences")

    @initialize(
        num_blocks=st.integers(1, 24),
        block_size=st.integers(1, 9),
        windows=st.sampled_from([(None,), (None,), (5,), (None, 3), (None, 8), (2, 6)]),
        members=st.integers(1, 2),
        halves=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...],
        members: int,
        halves: bool,
        seed: int,
    ) -> None:
        pieces = 2 if halves and block_size % 2 == 0 else 1
        groups = [LayerGroup(windows[0]), *(LayerGroup(w, members, pieces) for w in windows[1:])]
        self.allocator = BlockAllocator(num_blocks * len(groups), block_size, groups, MAX_TOKENS)
        self.random = random.Random(seed)
        self.memory: dict[Place, Content] = {}
        self.contents: dict[int, list[int]] = {}
        self.copies: list[BlockCopy] = []  # of the step under way
        self.unwritten: dict[int, int] = {}  # sequence -> first position the step writes
        self.next_id = 0

    def _snapshot(self) -> object:
        allocator = self.allocator
        tables = {seq_id: allocator.table(seq_id).tolist() for seq_id in self.contents}
        return (
            tables,
            allocator.store.num_available,
            allocator.store.num_idle,
            allocator.store.cow_clones,
        )

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def _dispatch(self) -> None:
        """Perform the step: copies, then writes."""
        sources = {copy.src for copy in self.copies}
        targets = {copy.dst for copy in self.copies}
        assert len(targets) == len(self.copies) and sources.isdisjoint(targets)
        size = self.allocator.block_size
        for copy in self.random.sample(self.copies, len(self.copies)):
            for offset in range(size):
                content = self.memory.get((copy.src, offset), (-1, -1, ()))
                self.memory[copy.dst, offset] = content
        for seq_id, start in self.unwritten.items():
            content = self.contents[seq_id]
            self.memory |= self._expected(seq_id, [start] * len(self.allocator.groups))
        self.allocator.store.copies_done()
        for seq_id in self.unwritten:
            self.allocator.register_prefix(
                seq_id, self.contents[seq_id], len(self.contents[seq_id])
            )
        self.copies, self.unwritten = [], {}

    def _expected(self, seq_id: int, starts: list[int]) -> dict[Place, Content]:
        """Where each group's K/V of a sequence is from a position on, and what is there."""
        tokens, expected = self.contents[seq_id], {}
        for i, (group, start) in enumerate(zip(self.allocator.groups, starts, strict=True)):
            positions = np.arange(start, len(tokens), dtype=np.int32)
            entries = self.allocator.table(seq_id, i)[positions // self.allocator.block_size]
            slots = self.allocator.store.slots(entries, positions, i).tolist()
            for member, row in enumerate(slots):
                for position, slot in enumerate(row, start):
                    place = divmod(slot, self.allocator.block_size // group.pieces)
                    assert place not in expected
                    expected[place] = (i, member, tuple(tokens[: position + 1]))
        return expected

    @rule(target=sequences, tokens=TOKENS, reuse=st.booleans(), spare=st.integers(0, 2))
    def new(self, tokens: list[int], reuse: bool, spare: int):
        before, seq_id = self._snapshot(), self._new_id()
        expected = self.allocator.cached_prefix(tokens) if reuse else 0
        try:
            admission = self.allocator.admit(
                seq_id, len(tokens), tokens if reuse else None, spare=spare
            )
        except OutOfBlocksError as error:
            assert error.needed > error.available and self._snapshot() == before
            return multiple()
        assert admission.num_cached == expected < len(tokens)
        assert self.allocator.store.num_available >= spare
        if admission.miss is None:
            worth = max(1, self.allocator.block_size // 4)
            left = len(tokens) - 1 - expected
            assert left == 0 or (expected % self.allocator.block_size == 0 and left < worth)
        self.copies += admission.copies
        self.contents[seq_id] = list(tokens)
        self.unwritten[seq_id] = admission.num_cached
        return seq_id

    @rule(chosen=st.lists(sequences, max_size=6, unique=True), token=st.integers(0, 2))
    def append_to_each(self, chosen: list[int], token: int):
        """A step of decodes."""
        before = self._snapshot()
        lengths = [len(self.contents[seq_id]) for seq_id in chosen]
        try:
            self.copies += self.allocator.append_each(chosen, lengths)[0]
        except OutOfBlocksError as error:
            assert error.needed == self.allocator.blocks_to_append(len(chosen)) > error.available
            assert self._snapshot() == before
            return
        for seq_id, length in zip(chosen, lengths, strict=True):
            self.contents[seq_id].append(token)
            self.unwritten.setdefault(seq_id, length)

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> int:
        if parent in self.unwritten:
            self._dispatch()
        child = self._new_id()
        in_use = self.allocator.store.blocks_in_use
        self.allocator.fork(parent, child)
        assert self.allocator.store.blocks_in_use == in_use
        self.contents[child] = list(self.contents[parent])
        return child

    @rule(target=sequences, parent=sequences, tokens=TOKENS)
    def fork_within_the_step(self, parent: int, tokens: list[int]):
        """The child writes, in the same step, all that the parent is about to write, and more."""
        child, start = self._new_id(), self.unwritten.get(parent, len(self.contents[parent]))
        self.allocator.fork(parent, child)
        self.contents[child] = list(self.contents[parent])
        if self._overwrite(child, start, self.contents[parent][start:] + tokens):
            return child
        self.allocator.free(child)
        del self.contents[child]
        return multiple()

    @rule(seq_id=sequences, tokens=TOKENS)
    def append(self, seq_id: int, tokens: list[int]) -> None:
        if seq_id in self.unwritten:
            self._dispatch()
        self._overwrite(seq_id, len(self.contents[seq_id]), tokens)

    @rule(seq_id=sequences, data=st.data(), tokens=TOKENS)
    def rewrite_from_the_middle(self, seq_id: int, data: st.DataObject, tokens: list[int]) -> None:
        if seq_id in self.unwritten:
            self._dispatch()
        length = len(self.contents[seq_id])
        start = data.draw(st.integers(max(0, length - len(tokens)), length - 1))
        if self.allocator.can_continue(seq_id, start):
            self._overwrite(seq_id, start, tokens)

    @rule(seq_id=sequences, offers=st.booleans())
    def let_go(self, seq_id: int, offers: bool) -> None:
        if seq_id in self.unwritten:
            self._dispatch()
        self.allocator.trim(seq_id, len(self.contents[seq_id]), offers)

    def _overwrite(self, seq_id: int, start: int, tokens: list[int]) -> bool:
        before = self._snapshot()
        try:
            copies = self.allocator.make_writable(seq_id, start, start + len(tokens))
        except OutOfBlocksError as error:
            assert error.needed > error.available and self._snapshot() == before
            return False
        self.copies += copies
        self.contents[seq_id][start:] = tokens
        self.unwritten[seq_id] = start
        return True

    @rule()
    def dispatch(self) -> None:
        self._dispatch()

    @rule(seq_id=consumes(sequences), offer=st.booleans())
    def free(self, seq_id: int, offer: bool) -> None:
        """Whatever the step was to write for the sequence is not written then."""
        num_computed = self.unwritten.pop(seq_id, len(self.contents[seq_id]))
        if offer:
            self.allocator.register_tail(seq_id, self.contents[seq_id], num_computed)
        self.allocator.free(seq_id)
        del self.contents[seq_id]

    @rule(data=st.data(), seq_id=sequences)
    def offer_and_go_on(self, data: st.DataObject, seq_id: int) -> None:
        num_computed = self.unwritten.get(seq_id, len(self.contents[seq_id]))
        first = max(self.allocator._sequence(seq_id).first_entries) * self.allocator.block_size
        num_offered = data.draw(st.integers(min(first, num_computed), num_computed))
        self.allocator.register_tail(seq_id, self.contents[seq_id], num_offered)

    @rule()
    def drop_cached(self) -> None:
        self.allocator.store.drop_idle()
        assert self.allocator.store.num_idle == 0

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check_integrity()

    @invariant()
    def every_sequence_reads_what_its_own_tokens_wrote(self) -> None:
        if getattr(self, "copies", None) or getattr(self, "unwritten", None):
            return
        for seq_id in getattr(self, "contents", {}):
            firsts = self.allocator._sequence(seq_id).first_entries
            starts = [first * self.allocator.block_size for first in firsts]
            expected = self._expected(seq_id, starts)
            assert {place: self.memory[place] for place in expected} == expected

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            self._dispatch()
            self.every_sequence_reads_what_its_own_tokens_wrote()
            for seq_id in list(self.contents):
                self.allocator.free(seq_id)
            assert self.allocator.store.blocks_in_use == 0


AllocatorMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestAllocator = AllocatorMachine.TestCase
