"""Random histories of an allocator, with a model of the memory it manages."""

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

from mlx_paged.block_allocator import BlockAllocator, OutOfBlocksError

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences write into simulated slots; whatever happens, each must read its own back.

    What is written at a position stands for K/V: it depends on all tokens up to there. There are
    few distinct tokens, so that prefixes are often shared.
    """

    sequences = Bundle("sequences")

    @initialize(num_blocks=st.integers(1, 24), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.memory: dict[int, tuple[int, ...]] = {}  # slot -> tokens up to its position
        self.contents: dict[int, list[int]] = {}
        self.next_id = 0

    def _snapshot(self) -> object:
        allocator = self.allocator
        tables = {seq_id: allocator.table(seq_id).tolist() for seq_id in self.contents}
        return tables, allocator.num_available, allocator.cow_clones

    def _write(self, seq_id: int, start: int) -> None:
        content = self.contents[seq_id]
        slots = self.allocator.slots(seq_id, start, len(content)).tolist()
        for position, slot in enumerate(slots, start):
            self.memory[slot] = tuple(content[: position + 1])

    @rule(target=sequences, tokens=TOKENS, reuse=st.booleans())
    def new(self, tokens: list[int], reuse: bool):
        before = self._snapshot()
        seq_id, self.next_id = self.next_id, self.next_id + 1
        try:
            cached = self.allocator.add_sequence(seq_id, len(tokens), tokens if reuse else None)
        except OutOfBlocksError as error:
            assert error.needed > error.available and self._snapshot() == before
            return multiple()
        assert cached < len(tokens) and (reuse or cached == 0)
        self.contents[seq_id] = list(tokens)
        self._write(seq_id, cached)
        self.allocator.commit(seq_id, tokens, len(tokens))
        return seq_id

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> int:
        child, self.next_id = self.next_id, self.next_id + 1
        in_use = self.allocator.blocks_in_use
        self.allocator.fork(parent, child)
        assert self.allocator.blocks_in_use == in_use
        self.contents[child] = list(self.contents[parent])
        return child

    @rule(seq_id=sequences, tokens=TOKENS)
    def append(self, seq_id: int, tokens: list[int]) -> None:
        self._overwrite(seq_id, len(self.contents[seq_id]), tokens)

    @rule(seq_id=sequences, data=st.data(), tokens=TOKENS)
    def rewrite_from_the_middle(self, seq_id: int, data: st.DataObject, tokens: list[int]) -> None:
        length = len(self.contents[seq_id])
        start = data.draw(st.integers(max(0, length - len(tokens)), length - 1))
        self._overwrite(seq_id, start, tokens)

    def _overwrite(self, seq_id: int, start: int, tokens: list[int]) -> None:
        before = self._snapshot()
        try:
            copies = self.allocator.make_writable(seq_id, start, start + len(tokens))
        except OutOfBlocksError as error:
            assert error.needed > error.available and self._snapshot() == before
            return
        size = self.allocator.block_size
        for copy in copies:
            for offset in range(size):
                slot = copy.src * size + offset
                self.memory[copy.dst * size + offset] = self.memory.get(slot, ())
        content = self.contents[seq_id]
        content[start:] = tokens
        self._write(seq_id, start)
        self.allocator.commit(seq_id, content, len(content))

    @rule(seq_id=consumes(sequences))
    def free(self, seq_id: int) -> None:
        self.allocator.free(seq_id)
        del self.contents[seq_id]

    @rule()
    def drop_cached(self) -> None:
        self.allocator.drop_cached()
        assert self.allocator.num_cached == 0

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check_integrity()

    @invariant()
    def every_sequence_reads_what_its_own_tokens_wrote(self) -> None:
        for seq_id, tokens in getattr(self, "contents", {}).items():
            slots = self.allocator.slots(seq_id, 0, len(tokens)).tolist()
            prefixes = [tuple(tokens[: i + 1]) for i in range(len(tokens))]
            assert [self.memory[slot] for slot in slots] == prefixes

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            for seq_id in list(self.contents):
                self.allocator.free(seq_id)
            assert self.allocator.blocks_in_use == 0


AllocatorMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestAllocator = AllocatorMachine.TestCase
