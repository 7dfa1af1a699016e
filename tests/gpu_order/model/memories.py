"""Which memory each array has."""

from tests.gpu_order.model.encoder import Memory
from tests.gpu_order.model.ordering import EncoderSet, Ordering
from tests.gpu_order.model.rules import Rule
from tests.gpu_order.model.trace import Array, Op


class Memories:
    """MLX's allocator: memory is shared, donated, freed and used again."""

    def __init__(self, ordering: Ordering, rules: frozenset[Rule]) -> None:
        self._ordering = ordering
        self._rules = rules
        self._of: dict[Array, Memory] = {}
        self._users: dict[Memory, set[Array]] = {}
        self._holders: dict[Memory, EncoderSet] = {}  # encoders that bound it
        self._freed: list[Memory] = []
        self._next = 0

    def of(self, array: Array) -> Memory:
        """An array's memory; of its own if the trace does not say where the array comes from."""
        if array not in self._of:
            self._give(array, self._new())
        return self._of[array]

    def make(self, op: Op) -> None:
        """Give memory to an op's outputs."""
        for output in op.outputs:
            if output in op.shares:
                self._give(output, self.of(op.shares[output]))
            elif output in op.donates and self._is_donatable(op.donates[output]):
                donor = op.donates[output]
                self._give(output, self.of(donor))
                self._users[self.of(donor)].discard(donor)
            else:
                self._give(output, self._allocated())

    def hold(self, memory: Memory, encoder: int) -> None:
        """A command buffer holds what its encoder binds until it is complete."""
        self._holders[memory] = self._holders.get(memory, 0) | 1 << encoder

    def free(self, array: Array) -> None:
        memory = self.of(array)
        self._users[memory].discard(array)
        if not self._users[memory]:
            self._freed.append(memory)

    def _is_donatable(self, array: Array) -> bool:
        memory = self.of(array)
        is_used = len(self._users[memory]) > 1
        return not is_used and (Rule.DONATION not in self._rules or self._is_complete(memory))

    def _allocated(self) -> Memory:
        for memory in self._freed:
            if Rule.HELD_UNTIL_COMPLETE not in self._rules or self._is_complete(memory):
                self._freed.remove(memory)
                return memory
        return self._new()

    def _is_complete(self, memory: Memory) -> bool:
        return not self._holders.get(memory, 0) & ~self._ordering.done

    def _new(self) -> Memory:
        self._next += 1
        return self._next

    def _give(self, array: Array, memory: Memory) -> None:
        self._of[array] = memory
        self._users.setdefault(memory, set()).add(array)
