"""MLX's Metal backend, as far as it decides what runs after what."""

from collections import Counter
from dataclasses import dataclass, field

from tests.gpu_order.model.conflicts import Conflicts, Hazard
from tests.gpu_order.model.encoder import Encoder, Memory, Touch
from tests.gpu_order.model.memories import Memories
from tests.gpu_order.model.ordering import EncoderSet, Ordering
from tests.gpu_order.model.rules import ALL_RULES, Rule
from tests.gpu_order.model.trace import (
    Array,
    Completed,
    Eval,
    Event,
    Free,
    HostWait,
    Op,
    Synchronize,
)

MAX_OPS = 40
"""Dispatches in a command buffer of a base or Pro chip."""

MAX_ELEMENTS = 40
"""Elements that such a command buffer binds, in units of 2^20."""


@dataclass(eq=False)
class _Queue:
    """MLX's CommandEncoder of one stream.

    Attributes:
        fences: by memory, the encoder that wrote it last and is not known to be complete.
        waits: what the rest of the command buffer waits for.
        ended: encoders of the present eval.
    """

    encoder: Encoder | None = None
    fences: dict[Memory, int] = field(default_factory=dict)
    readers: dict[Memory, EncoderSet] = field(default_factory=dict)
    num_ops: int = 0
    num_elements: int = 0
    waits: EncoderSet = 0
    ended: EncoderSet = 0
    everything: EncoderSet = 0
    outputs: dict[int, set[Memory]] = field(default_factory=dict)


@dataclass
class Report:
    """The verdict on a trace.

    Attributes:
        hazards: pairs of accesses that nothing orders.
        commits: for each eval, why its command buffers ended: "operations", "elements", "eval".
        full: the ops at which a command buffer had too many elements.
    """

    hazards: list[Hazard]
    commits: list[Counter[str]] = field(default_factory=list)
    full: list[Op] = field(default_factory=list)

    @property
    def command_buffers(self) -> list[int]:
        """How many command buffers each eval has."""
        return [commits.total() for commits in self.commits]


class Backend:
    """Encodes a trace, event by event.

    Args:
        rules: those that hold; the others are knocked out.
    """

    def __init__(
        self,
        rules: frozenset[Rule] = ALL_RULES,
        max_ops: int = MAX_OPS,
        max_elements: int = MAX_ELEMENTS,
    ) -> None:
        self._rules = rules
        self._max_ops = max_ops
        self._max_elements = max_elements
        self._ordering = Ordering()
        self._memories = Memories(self._ordering, rules)
        self._conflicts = Conflicts(self._ordering)
        self._queues: dict[int, _Queue] = {}
        self._report = Report(self._conflicts.found)
        self._made: dict[Array, tuple[int, int]] = {}  # eval and stream of each array
        self._evals: list[dict[int, EncoderSet]] = []  # the encoders of each eval, by stream
        self._labels: list[str] = []
        self._marks: dict[Array, EncoderSet] = {}  # what a stream's fence counts as complete

    def encode(self, event: Event) -> None:
        match event:
            case Eval():
                self._eval(event)
            case HostWait(array):
                if array in self._made and Rule.HOST_WAIT in self._rules:
                    index, stream = self._made[array]
                    self._ordering.host_waits(self._evals[index].get(stream, 0))
            case Synchronize(stream):
                if Rule.SYNCHRONIZE in self._rules:
                    self._ordering.host_waits(self._queue(stream).everything)
            case Completed(through):
                self._complete(through)
            case Free(array):
                self._memories.free(array)

    def finish(self) -> Report:
        """The verdict; encoders that are still open end here."""
        for queue in self._queues.values():
            self._end_encoding(queue)
        return self._report

    # An eval

    def _eval(self, event: Eval) -> None:
        index = len(self._evals)
        self._evals.append({})
        self._labels.append(event.label)
        self._report.commits.append(Counter())
        streams = {op.stream for op in event.ops}
        for stream in streams:
            self._queue(stream).ended = 0
        needs_fence = self._needs_fence(event) if len(streams) > 1 else set()
        for op in event.ops:
            self._wait_for_other_streams(op, index)
            self._op(op, event.label)
            for output in op.outputs:
                self._made[output] = index, op.stream
                if output in needs_fence:
                    queue = self._queue(op.stream)
                    self._end_encoding(queue)
                    self._marks[output] = queue.ended
        for stream in streams:
            queue = self._queue(stream)
            if Rule.EVAL_COMMITS in self._rules:
                self._end_encoding(queue)
                self._commit(queue, "eval")
            self._evals[index][stream] = queue.ended
        if event.waits and Rule.HOST_WAIT in self._rules:
            for encoders in self._evals[index].values():
                self._ordering.host_waits(encoders)

    @staticmethod
    def _needs_fence(event: Eval) -> set[Array]:
        """Arrays that another stream of the eval uses."""
        made = {output: op.stream for op in event.ops for output in op.outputs}
        return {
            array
            for op in event.ops
            for array in op.inputs
            if made.get(array, op.stream) != op.stream
        }

    def _wait_for_other_streams(self, op: Op, index: int) -> None:
        for array in op.inputs:
            made_in, stream = self._made.get(array, (index, op.stream))
            if stream == op.stream:
                continue
            if made_in == index:
                rule, encoders = Rule.FENCE_BETWEEN_STREAMS, self._marks[array]
            else:
                rule, encoders = Rule.EVENT_BETWEEN_EVALS, self._evals[made_in].get(stream, 0)
            if rule in self._rules:
                queue = self._queue(op.stream)
                self._end_encoding(queue)
                queue.waits |= encoders

    def _op(self, op: Op, label: str) -> None:
        self._memories.make(op)
        if not op.bindings:
            return
        queue = self._queue(op.stream)
        encoder = queue.encoder
        if encoder is None:
            encoder = queue.encoder = Encoder(self._ordering.new_encoder(), self._rules)
        memories = {binding.array: self._memories.of(binding.array) for binding in op.bindings}
        touches = [
            Touch(op, label, encoder.index, 0, memories[a.array], a.is_write, a.units)
            for a in op.all_accesses()
        ]
        before = encoder.counted
        encoder.enter(op.context)
        for _ in range(op.dispatches):
            for binding in op.bindings:
                encoder.bind(memories[binding.array], binding.role, binding.elements)
            encoder.dispatch(touches)
        for memory in memories.values():
            self._memories.hold(memory, encoder.index)
        queue.num_ops += op.dispatches
        queue.num_elements += encoder.counted - before
        if Rule.COMMIT_BY_ELEMENTS in self._rules and queue.num_elements >> 20 > self._max_elements:
            self._report.full.append(op)
            self._end_encoding(queue)
            self._commit(queue, "elements")
        elif Rule.COMMIT_BY_OPS in self._rules and queue.num_ops > self._max_ops:
            self._end_encoding(queue)
            self._commit(queue, "operations")

    # Encoders

    def _queue(self, stream: int) -> _Queue:
        return self._queues.setdefault(stream, _Queue())

    def _end_encoding(self, queue: _Queue) -> None:
        encoder, queue.encoder = queue.encoder, None
        if encoder is None:
            return
        encoder.end()
        index = encoder.index
        waits = queue.waits
        if Rule.FENCE in self._rules:
            for memory in encoder.all_inputs & queue.fences.keys():
                waits |= 1 << queue.fences[memory]
        if Rule.FENCE_IGNORES_INPUTS not in self._rules:
            for memory in encoder.all_outputs & queue.readers.keys():
                waits |= queue.readers[memory]
            for memory in encoder.all_inputs:
                queue.readers[memory] = queue.readers.get(memory, 0) | 1 << index
        self._ordering.wait(index, waits)
        queue.fences.update(dict.fromkeys(encoder.all_outputs, index))
        queue.outputs[index] = encoder.all_outputs
        queue.ended |= 1 << index
        queue.everything |= 1 << index
        self._conflicts.add(encoder.touches)

    def _commit(self, queue: _Queue, cause: str) -> None:
        self._report.commits[-1][cause] += 1
        queue.num_ops = queue.num_elements = queue.waits = 0

    def _complete(self, through: str) -> None:
        """Run the completion handlers of all evals up to the one with this label."""
        complete = 0
        for encoders in self._evals[: self._labels.index(through) + 1]:
            for ended in encoders.values():
                complete |= ended
        self._ordering.host_waits(complete)
        for queue in self._queues.values():
            for index in [i for i in queue.outputs if complete >> i & 1]:
                for memory in queue.outputs.pop(index):
                    is_own = queue.fences.get(memory) == index
                    if is_own or Rule.OWN_FENCE not in self._rules:
                        queue.fences.pop(memory, None)


def judge(trace: list[Event], rules: frozenset[Rule] = ALL_RULES, **limits: int) -> Report:
    """The verdict on a whole trace.

    Args:
        limits: `max_ops` and `max_elements` of a command buffer.
    """
    backend = Backend(rules, **limits)
    for event in trace:
        backend.encode(event)
    return backend.finish()
