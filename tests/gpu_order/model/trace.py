"""What a process gives to MLX's Metal backend, in the order in which MLX evaluates it."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum

Array = Hashable
"""An array of MLX's graph. Several arrays may share one memory, as views and pool handles do."""

Unit = Hashable
"""A part of a memory, such as a block of a pool; parts overlap only if they are equal."""


class Role(StrEnum):
    """How an op binds an array."""

    INPUT = "input"
    OUTPUT = "output"
    POOL_READ = "pool_read"  # set_buffer, then set_input_array
    POOL_WRITE = "pool_write"  # set_buffer, then set_output_array
    BUFFER = "buffer"  # set_buffer alone
    TEMPORARY = "temporary"  # an output that is given to add_temporary


@dataclass(frozen=True)
class Binding:
    """An array that an op binds.

    Attributes:
        elements: of the memory behind it, which MLX counts; 0 where they do not matter.
    """

    array: Array
    role: Role
    elements: int = 0


@dataclass(frozen=True)
class Access:
    """What an op reads or writes of an array's memory; no units: all of it."""

    array: Array
    is_write: bool
    units: frozenset[Unit] | None = None


@dataclass(frozen=True, eq=False)
class Op:
    """A primitive that MLX evaluates.

    Attributes:
        inputs: its inputs in the graph.
        bindings: what it binds, in order; none: it launches nothing, as a view does.
        shares: outputs that are views of inputs, or inputs written in place.
        donates: outputs that take the memory of an input if nobody else uses that memory.
        accesses: default: every binding as a whole.
        dispatches: kernels that it launches; each has the same bindings.
        context: the ConcurrentContext in which it launches them.
    """

    name: str
    stream: int = 0
    inputs: tuple[Array, ...] = ()
    outputs: tuple[Array, ...] = ()
    bindings: tuple[Binding, ...] = ()
    shares: dict[Array, Array] = field(default_factory=dict)
    donates: dict[Array, Array] = field(default_factory=dict)
    accesses: tuple[Access, ...] | None = None
    dispatches: int = 1
    context: str | None = None

    def all_accesses(self) -> tuple[Access, ...]:
        """What it reads, then what it writes."""
        if self.accesses is not None:
            return self.accesses
        writes = {Role.OUTPUT, Role.POOL_WRITE, Role.TEMPORARY}
        return tuple(Access(b.array, b.role in writes) for b in self.bindings)


@dataclass(frozen=True)
class Eval:
    """One call of mx.eval or mx.async_eval.

    Attributes:
        ops: in the order of evaluation.
        label: what the report calls it.
        waits: the host waits for it, as mx.eval does.
    """

    ops: tuple[Op, ...]
    label: str
    waits: bool = False


@dataclass(frozen=True)
class HostWait:
    """The host waits until the eval that computes an array is done."""

    array: Array


@dataclass(frozen=True)
class Synchronize:
    """mx.synchronize: the host waits for all work of a stream."""

    stream: int = 0


@dataclass(frozen=True)
class Completed:
    """The GPU completes all evals up to the one with this label before the next event."""

    through: str


@dataclass(frozen=True)
class Free:
    """The last reference to an array is dropped."""

    array: Array


Event = Eval | HostWait | Synchronize | Completed | Free
Trace = list[Event]
