"""The books of one command encoder."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.gpu_order.model.rules import Rule
from tests.gpu_order.model.trace import Op, Role, Unit

Memory = int


class Touch(NamedTuple):
    """An access at its place: dispatches of one encoder with equal epochs may run at once."""

    op: Op
    label: str
    encoder: int
    epoch: int
    memory: Memory
    is_write: bool
    units: frozenset[Unit] | None


@dataclass(eq=False)
class Encoder:
    """What MLX's CommandEncoder keeps from the first dispatch to end_encoding.

    Attributes:
        index: unique; later ones are larger.
        all_inputs: what fences are waited for.
        all_outputs: what later encoders wait for.
        epoch: how many barriers there were.
        counted: elements of the buffers that were bound.
    """

    index: int
    rules: frozenset[Rule]
    all_inputs: set[Memory] = field(default_factory=set)
    all_outputs: set[Memory] = field(default_factory=set)
    temporaries: set[Memory] = field(default_factory=set)
    touches: list[Touch] = field(default_factory=list)
    epoch: int = 0
    counted: int = 0

    def __post_init__(self) -> None:
        self._needs_barrier = False
        self._prev_inputs: set[Memory] = set()
        self._prev_outputs: set[Memory] = set()
        self._next_inputs: set[Memory] = set()
        self._next_outputs: set[Memory] = set()
        self._context: str | None = None
        self._concurrent_outputs: set[Memory] = set()

    def enter(self, context: str | None) -> None:
        """The next dispatches are in this concurrent context; None: in none."""
        if context != self._context:
            self._prev_outputs |= self._concurrent_outputs
            self._concurrent_outputs = set()
            self._context = context

    def bind(self, memory: Memory, role: Role, elements: int) -> None:
        if role in (Role.POOL_READ, Role.POOL_WRITE, Role.BUFFER):
            self._set_buffer(memory)
        if role in (Role.INPUT, Role.POOL_READ):
            self._set_input(memory, elements)
        if role in (Role.OUTPUT, Role.POOL_WRITE, Role.TEMPORARY):
            self._set_output(memory, elements)
        if role is Role.TEMPORARY:
            self.temporaries.add(memory)

    def dispatch(self, touches: Iterable[Touch]) -> None:
        """Launch a kernel, after a barrier if one is needed."""
        if self._needs_barrier:
            self._needs_barrier = False
            self.epoch += 1
            keeps = Rule.BARRIER_KEEPS_ITS_DISPATCH in self.rules
            self._prev_inputs = self._next_inputs if keeps else set()
            self._prev_outputs = self._next_outputs if keeps else set()
        else:
            self._prev_inputs |= self._next_inputs
            self._prev_outputs |= self._next_outputs
        self._next_inputs, self._next_outputs = set(), set()
        self.touches += [touch._replace(epoch=self.epoch) for touch in touches]

    def end(self) -> None:
        """What the first lines of end_encoding do."""
        if Rule.TEMPORARIES in self.rules:
            self.all_inputs -= self.temporaries
            self.all_outputs -= self.temporaries

    def _set_buffer(self, memory: Memory) -> None:
        self.all_inputs.add(memory)
        if Rule.SET_BUFFER_IS_BOTH in self.rules:
            self.all_outputs.add(memory)
        if Rule.SET_BUFFER_HAS_NO_BARRIER not in self.rules:
            self._set_input(memory, 0)
            self._register_output(memory)

    def _set_input(self, memory: Memory, elements: int) -> None:
        if memory not in self.all_inputs or Rule.COUNT_ONCE not in self.rules:
            self.counted += elements
        self.all_inputs.add(memory)
        self._next_inputs.add(memory)
        if Rule.INPUT_AFTER_OUTPUT in self.rules and memory in self._prev_outputs:
            self._needs_barrier = True

    def _set_output(self, memory: Memory, elements: int) -> None:
        if Rule.OUTPUT_IS_INPUT in self.rules:
            self._set_input(memory, elements)
        self._register_output(memory)

    def _register_output(self, memory: Memory) -> None:
        self.all_outputs.add(memory)
        if self._context is not None and Rule.CONCURRENT in self.rules:
            self._concurrent_outputs.add(memory)
            return
        self._next_outputs.add(memory)
        if Rule.OUTPUT_AFTER_INPUT in self.rules and memory in self._prev_inputs:
            self._needs_barrier = True
